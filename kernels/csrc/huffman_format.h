// Pages of error-bounded codes under Huffman codes (Kind::kHuffman), the format HuffmanFormat of Python. x^ = (n +
// c)·s, where the values of a unit share s and n. Codes c are coded with one of the alphabet's books.
#pragma once

#include "page_format.h"

namespace hack {

inline constexpr int kSlices = 16;       // parts of a page's codes that decode side by side
inline constexpr int kSlackBytes = 8;    // behind the last slice, so that a decoder reads words
inline constexpr int kLookupBits = 12;   // of the longest code
inline constexpr int kMostSymbols = 64;
inline constexpr int kMostRungs = 16;

enum class Unit : int { kBlock, kChannel, kToken };

// How K or V is kept. Tables are those of `Books` in huffman_format.py, and outlive the format.
struct HuffmanSide {
  Unit unit;
  int symbols;
  int books;
  std::int64_t room;          // bits that all codes of a page may take
  int rung_count;
  float rungs[kMostRungs];    // possible steps, as shares of a unit's range, ascending
  const std::int32_t* codes;  // [books, symbols]: the code, and from bit 16 on its length in bits
  const std::int64_t* lookup;  // [books, 2^12]: from bit 0 on the length of up to 4 symbols, from 8 the symbols,
                               // from 40 the length of the first, from 56 their number

  constexpr std::size_t coded_bytes() const { return std::size_t(room + 7) / 8 + kSlices + kSlackBytes; }
};

struct HuffmanFormat : PageFormat {
  HuffmanSide k;
  HuffmanSide v;

  constexpr HuffmanFormat(int head_dim, int page_tokens, const HuffmanSide& k, const HuffmanSide& v)
      : PageFormat(Kind::kHuffman, head_dim, page_tokens), k(k), v(v) {
    add_side(k, "k_step", "k_first", "k_book", "k_sizes", "k_codes");
    add_side(v, "v_step", "v_first", "v_book", "v_sizes", "v_codes");
  }

  constexpr int units(const HuffmanSide& side) const {
    return side.unit == Unit::kBlock ? 1 : side.unit == Unit::kChannel ? head_dim : page_tokens;
  }

 private:
  constexpr void add_side(const HuffmanSide& side, const char* step, const char* first, const char* book,
                          const char* sizes, const char* coded) {
    add({step, Element::kHalf, std::size_t(units(side))});
    add({first, Element::kShort, std::size_t(units(side))});
    add({book, Element::kByte, 2});
    add({sizes, Element::kShort, kSlices});
    add({coded, Element::kByte, side.coded_bytes()});
  }
};

[[gnu::always_inline]] constexpr const HuffmanFormat& as_huffman(const PageFormat& format) {
  return static_cast<const HuffmanFormat&>(format);
}

// K or V of one page.
template <class Byte, class Half, class Short>
struct BasicHuffman {
  Half* step;
  Short* first;
  Byte* book;  // [2]: the book, and the centre: the code of its symbol 0
  Short* sizes;
  Byte* coded;
};
using Huffman = BasicHuffman<std::uint8_t, std::uint16_t, std::int16_t>;
using ConstHuffman = BasicHuffman<const std::uint8_t, const std::uint16_t, const std::int16_t>;

// K is side 0, V is side 1.
template <class Side, class Planes>
[[gnu::always_inline]] inline Side huffman_side(const Planes& planes, int side) {
  const auto* at = planes.at + 5 * side;
  return {reinterpret_cast<decltype(Side::step)>(at[0]), reinterpret_cast<decltype(Side::first)>(at[1]),
          reinterpret_cast<decltype(Side::book)>(at[2]), reinterpret_cast<decltype(Side::sizes)>(at[3]),
          reinterpret_cast<decltype(Side::coded)>(at[4])};
}

}  // namespace hack
