// Pages of codes (Kind::kHack), the format HackFormat of Python: sizes of every plane, and the order in which codes
// rest.
//
// Native order. A vector of 64 bytes holds [16 lanes][4 elements] with 8/bits planes, plane f in bits f*bits..: one
// shift and one AND make the unsigned operand of a 4-way integer dot product, and no lane ever needs a horizontal sum.
//   K: lanes are 16 tokens, elements are channels.  k_codes [Π/16][D/chunk][16 tokens][4], channel = chunk*c + 4f + i
//   V: lanes are 16 channels, elements are tokens.  v_codes [D/16][Π/chunk][16 channels][4], token = chunk*c + 4f + i
// where chunk = 4 * planes. k_min, k_scale and k_sums rest as [G][Π]; v_min, v_scale and v_sums as [D].
#pragma once

#include "page_format.h"
#include "widths.h"

namespace hack {

inline constexpr int kQuad = 4;  // codes that one lane multiplies at once
inline constexpr int kVectorBytes = kLanes * kQuad;
inline constexpr float kSymmetricLevels = 127.0f;
inline constexpr float kAsymmetricLevels = 255.0f;
inline constexpr float kMaxHalf = 65504.0f;

static_assert(kVectorBytes == 64, "a vector of codes is one cache line");

constexpr int planes_of(int bits) {
  return 8 / bits;
}
constexpr int chunk_of(int bits) {
  return kQuad * planes_of(bits);
}

struct HackSettings {
  int head_dim;
  int page_tokens;
  int k_bits;
  int v_bits;
  int k_partition;
  bool stochastic;
  bool asymmetric;
  bool stored_sums;
  bool own_k_codes;  // open page: K as codes (K_CODES) instead of FP16 (EXACT)
  bool own_v_codes;  // open page: V as codes too (REQUANTIZE); it then rests among the sealed pages
  std::uint64_t seed;
};

struct HackFormat : PageFormat {
  int k_bits;
  int v_bits;
  int k_partition;
  bool stochastic;
  bool asymmetric;
  bool stored_sums;
  bool own_k_codes;
  std::uint64_t seed;

  constexpr explicit HackFormat(const HackSettings& s)
      : PageFormat(Kind::kHack, s.head_dim, s.page_tokens),
        k_bits(s.k_bits),
        v_bits(s.v_bits),
        k_partition(s.k_partition),
        stochastic(s.stochastic),
        asymmetric(s.asymmetric),
        stored_sums(s.stored_sums),
        own_k_codes(s.own_k_codes),
        seed(s.seed) {
    own_page_rests = s.own_v_codes;
    add({"k_codes", Element::kByte, k_code_bytes()});
    add({"k_min", Element::kHalf, k_meta()});
    add({"k_scale", Element::kHalf, k_meta()});
    add({"v_codes", Element::kByte, v_code_bytes()});
    add({"v_min", Element::kHalf, v_meta()});
    add({"v_scale", Element::kHalf, v_meta()});
    if (!sums_at_rest()) return;
    add({"k_sums", k_sum_bytes() == 1 ? Element::kByte : Element::kShort, k_meta(), true});
    add({"v_sums", v_sum_bytes() == 1 ? Element::kByte : Element::kShort, v_meta(), true});
  }

  constexpr int k_groups() const { return head_dim / k_partition; }
  constexpr bool sums_at_rest() const { return asymmetric && stored_sums; }
  constexpr std::size_t k_code_bytes() const { return elements() * k_bits / 8; }
  constexpr std::size_t v_code_bytes() const { return elements() * v_bits / 8; }
  constexpr std::size_t k_meta() const { return std::size_t(page_tokens) * k_groups(); }
  constexpr std::size_t v_meta() const { return std::size_t(head_dim); }
  constexpr int k_sum_bytes() const { return sum_bytes(k_bits, k_partition); }
  constexpr int v_sum_bytes() const { return sum_bytes(v_bits, page_tokens); }

 private:
  static constexpr int sum_bytes(int bits, int partition) { return ((1 << bits) - 1) * partition <= 255 ? 1 : 2; }
};

[[gnu::always_inline]] constexpr const HackFormat& as_hack(const PageFormat& format) {
  return static_cast<const HackFormat&>(format);
}

// Bytes of one page of one KV head at head_dim 128, Π 64, 2 bits: the numbers of the design.
inline constexpr HackFormat kDesignPage{{128, 64, 2, 2, 64, false, true, true, false, false, 0}};
static_assert(kDesignPage.k_code_bytes() == 2048 && kDesignPage.v_code_bytes() == 2048);
static_assert(4 * kDesignPage.k_meta() == 512 && 4 * kDesignPage.v_meta() == 512);
static_assert(kDesignPage.k_meta() * kDesignPage.k_sum_bytes() == 128);
static_assert(kDesignPage.v_meta() * kDesignPage.v_sum_bytes() == 128);

// The planes of one page of one KV head by name, in the order of the format; sums are null where it keeps none.
template <class Byte, class Half>
struct BasicHackPage {
  Byte* k_codes;
  Half* k_min;
  Half* k_scale;
  Byte* v_codes;
  Half* v_min;
  Half* v_scale;
  Byte* k_sums;
  Byte* v_sums;
};
using HackPage = BasicHackPage<std::uint8_t, std::uint16_t>;
using ConstHackPage = BasicHackPage<const std::uint8_t, const std::uint16_t>;

template <class Page, class Planes>
[[gnu::always_inline]] inline Page hack_page(const Planes& planes) {
  const auto bytes = [&](int i) { return reinterpret_cast<decltype(Page::k_codes)>(planes.at[i]); };
  const auto halves = [&](int i) { return reinterpret_cast<decltype(Page::k_min)>(planes.at[i]); };
  return {bytes(0), halves(1), halves(2), bytes(3), halves(4), halves(5), bytes(6), bytes(7)};
}

}  // namespace hack
