// Pages of small floating-point numbers (Kind::kFloats), the format FloatFormat of Python: codes of 4, 6 or 8 bits, a
// scale for each page or for each block of channels of a row.
#pragma once

#include "packed_rows.h"

namespace hack {

// One kind of element: sign, exponent and mantissa from the top bit down, no infinities.
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;
  float largest;

  constexpr int bits() const { return 1 + exponent_bits + mantissa_bits; }
  constexpr int shape() const { return exponent_bits << 4 | mantissa_bits; }
  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};
// Bits of exponent and of mantissa, a hexadecimal digit each.
using FloatShapes = OneOf<0x43, 0x32, 0x23, 0x21>;
inline constexpr SmallFloat kE4M3{4, 3, 448.0f};

// The factor of a code: an FP32 of the page; a power of two of the block (E8M0); or an E4M3 of the block times an FP32
// of the page, the *gain*.
enum class Scaling : int { kPage, kPower, kTwofold };

struct FloatFormat : PageFormat {
  SmallFloat element;
  Scaling scaling;
  int block;  // channels that share a scale; the whole row where the page has one

  constexpr FloatFormat(int head_dim, int page_tokens, SmallFloat element, Scaling scaling, int block)
      : PageFormat(Kind::kFloats, head_dim, page_tokens),
        element(element),
        scaling(scaling),
        block(scaling == Scaling::kPage ? head_dim : block) {
    constexpr const char* names[2][4] = {{"k", "k_high", "k_scale", "k_gain"}, {"v", "v_high", "v_scale", "v_gain"}};
    const int bits = element.bits();
    for (const auto& name : names) {
      add({name[0], Element::kByte, elements() * packed_low(bits) / 8});
      if (packed_high(bits) != 0) add({name[1], Element::kByte, elements() * packed_high(bits) / 8});
      if (scaling == Scaling::kPage) {
        add({name[2], Element::kFloat, 1});
      } else {
        add({name[2], Element::kByte, elements() / this->block});
      }
      if (scaling == Scaling::kTwofold) add({name[3], Element::kFloat, 1});
    }
  }

  constexpr std::size_t blocks() const { return elements() / std::size_t(block); }
};

[[gnu::always_inline]] constexpr const FloatFormat& as_floats(const PageFormat& format) {
  return static_cast<const FloatFormat&>(format);
}

// K or V of one page; null where the format has no such plane.
template <class Byte, class Float>
struct BasicFloats {
  Byte* codes;
  Byte* high;
  Byte* scale;   // of blocks
  Float* whole;  // the page's scale or gain
};
using Floats = BasicFloats<std::uint8_t, float>;
using ConstFloats = BasicFloats<const std::uint8_t, const float>;

template <class Side>
struct FloatSides {
  Side k;
  Side v;
};

template <class Side, class Planes>
[[gnu::always_inline]] inline FloatSides<Side> float_sides(const FloatFormat& fmt, const Planes& planes) {
  using Byte = decltype(Side::codes);
  using Float = decltype(Side::whole);
  int next = 0;
  const auto take = [&]() -> Side {
    const auto codes = reinterpret_cast<Byte>(planes.at[next++]);
    const auto high = packed_high(fmt.element.bits()) != 0 ? reinterpret_cast<Byte>(planes.at[next++]) : nullptr;
    const auto scale = fmt.scaling != Scaling::kPage ? reinterpret_cast<Byte>(planes.at[next++]) : nullptr;
    const auto whole = fmt.scaling != Scaling::kPower ? reinterpret_cast<Float>(planes.at[next++]) : nullptr;
    return {codes, high, scale, whole};
  };
  const Side k = take();
  return {k, take()};
}

}  // namespace hack
