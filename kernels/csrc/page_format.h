// The engine's view of a page format: kind, shape and planes. Each kind adds its own settings.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace hack {

inline constexpr int kLanes = 16;  // lanes of a vector: FP32 values, or groups of 4 codes
inline constexpr int kMaxPageTokens = 128;
inline constexpr int kMaxHeadDim = 256;
inline constexpr float kLog2e = 1.44269504088896340736f;

// A kind of page defines what its planes mean; only its own operations read them (`PageOperations` in work.h). A new
// kind takes a value here, a format with its planes, a header with its operations, and a row in `operations_of`.
enum class Kind : int { kHack, kRows, kLevels, kFloats, kGroups, kNuq, kHuffman, kDeltas };
inline constexpr int kKinds = 8;

enum class Element : int { kByte, kShort, kHalf, kFloat };
constexpr std::size_t bytes_of(Element element) {
  return element == Element::kByte ? 1 : element == Element::kFloat ? 4 : 2;
}

// One array of a page of one KV head.
struct Plane {
  const char* name;
  Element element;
  std::size_t count;
  bool derived = false;  // follows from the other planes: `install` computes it where it is missing

  constexpr std::size_t bytes() const { return count * bytes_of(element); }
};

inline constexpr int kMaxPlanes = 10;

// Which pages queries see exactly; window.py has the definition. A slot holds `pages()` pages.
struct Window {
  int sink = 0;
  int recent = 0;

  constexpr int pages() const { return sink + recent + 1; }
  // Where in a slot a page lies, in pages.
  constexpr std::int64_t place(std::int64_t page) const {
    return page < sink ? page : sink + (page - sink) % (recent + 1);
  }
  // Queries of `page` see pages [first_coded, last_coded) as codes, and the others up to it exactly.
  constexpr std::int64_t first_coded(std::int64_t page) const { return std::min<std::int64_t>(sink, page); }
  constexpr std::int64_t last_coded(std::int64_t page) const { return std::max(first_coded(page), page - recent); }
};
inline constexpr int kMostExact = 3;  // sink + recent

struct PageFormat {
  Kind kind;
  int head_dim;
  int page_tokens;
  Window window = {};
  bool own_page_rests = false;  // the page of a sequence's last row lies among the sealed ones (REQUANTIZE)
  std::int64_t known_heads = 0;  // the number of the model's heads in the format's tables; 0: it has no tables
  int plane_count = 0;
  Plane planes[kMaxPlanes] = {};

  constexpr std::size_t elements() const { return std::size_t(page_tokens) * head_dim; }

 protected:
  constexpr PageFormat(Kind kind, int head_dim, int page_tokens)
      : kind(kind), head_dim(head_dim), page_tokens(page_tokens) {}
  constexpr void add(const Plane& plane) { planes[plane_count++] = plane; }
};

// Addresses of the planes of one page, or of several consecutive pages, in the order of the format. Null: absent.
template <class Byte>
struct BasicPlanes {
  Byte* at[kMaxPlanes] = {};
};
using Planes = BasicPlanes<std::byte>;
using ConstPlanes = BasicPlanes<const std::byte>;

// The planes of the page that lies `n` pages of one KV head further on.
template <class Byte>
[[gnu::always_inline]] constexpr BasicPlanes<Byte> advance(const PageFormat& format, BasicPlanes<Byte> planes,
                                                           std::size_t n) {
  for (int i = 0; i < format.plane_count; ++i)
    if (planes.at[i] != nullptr) planes.at[i] += n * format.planes[i].bytes();
  return planes;
}

}  // namespace hack
