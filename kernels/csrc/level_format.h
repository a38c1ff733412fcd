// Pages of levels (Kind::kLevels), the format LevelFormat of Python: codes around zero, one scale a row.
//
// Codes rest in the order of hack_format.h. Codes of 3 bits rest as a plane of 2 bits and a plane of 1 bit, which are
// joined in a register. A vector of highest bits belongs to two vectors of lower bits; the first of the two has the
// lower half of every byte. For K the two are of two blocks of 16 tokens, for V they follow one another.
//   k_high [Π/32][D/16][16 tokens][4], token = 32p + 16h + lane, channel = 16c + 4f + i in bit 4h + f
//   v_high [D/16][Π/32][16 channels][4], token = 32p + 16h + 4f + i in bit 4h + f
#pragma once

#include "hack_format.h"

namespace hack {

constexpr int low_bits(int bits) {
  return bits == 3 ? 2 : bits;
}

using LevelWidths = OneOf<2, 3, 4, 8>;

inline constexpr int kGainBlock = 8;

// Feedback of one KV head, or of all heads one after another. Null pointers: none.
struct Feedback {
  const float* gains;  // [D/8, D, 8]: at [b][i][c] the gain by which channel i > 8b + c acts on channel 8b + c
  // [D/8, D/2, 8]: at [b][j][c] the gains of channels 2j and 2j + 1 on channel 8b + c, in steps of GAIN_STEP, as two
  // words of 16 bits, that of channel 2j below.
  const std::int32_t* pair_gains;
  const float* weights;  // [D]
};

struct LevelFormat : PageFormat {
  int k_bits;
  int v_bits;
  bool narrow_scales;  // a byte each, else FP16 (level_scales.h)
  Feedback feedback;  // of K, of known_heads heads

  constexpr LevelFormat(int head_dim, int page_tokens, int k_bits, int v_bits, bool narrow_scales, Window exact,
                        Feedback feedback, std::int64_t heads)
      : PageFormat(Kind::kLevels, head_dim, page_tokens),
        k_bits(k_bits),
        v_bits(v_bits),
        narrow_scales(narrow_scales),
        feedback(feedback) {
    window = exact;
    known_heads = heads;
    const Element scale = narrow_scales ? Element::kByte : Element::kHalf;
    add({"k_codes", Element::kByte, code_bytes(low_bits(k_bits))});
    if (k_bits == 3) add({"k_high", Element::kByte, code_bytes(1)});
    add({"k_scale", scale, std::size_t(page_tokens)});
    add({"v_codes", Element::kByte, code_bytes(low_bits(v_bits))});
    if (v_bits == 3) add({"v_high", Element::kByte, code_bytes(1)});
    add({"v_scale", scale, std::size_t(page_tokens)});
  }

  constexpr Feedback feedback_of(int head) const {
    if (feedback.gains == nullptr) return feedback;
    const std::size_t d = head_dim;
    return {feedback.gains + head * d * d, feedback.pair_gains + head * d * d / 2, feedback.weights + head * d};
  }
  constexpr std::size_t code_bytes(int bits) const { return elements() * bits / 8; }
  constexpr std::size_t scale_bytes() const { return narrow_scales ? 1 : 2; }
  // The place of row t's scale in the scales that begin at `scales`.
  template <class Byte>
  constexpr Byte* scale_of(Byte* scales, int t) const {
    return scales + t * scale_bytes();
  }
};

[[gnu::always_inline]] constexpr const LevelFormat& as_levels(const PageFormat& format) {
  return static_cast<const LevelFormat&>(format);
}

// Codes of K or of V of one page, and their scales [Π]; `high` is null unless a code has 3 bits.
template <class Byte>
struct BasicLevels {
  Byte* codes;
  Byte* high;
  Byte* scale;
};

template <class Byte>
struct BasicLevelPage {
  BasicLevels<Byte> k;
  BasicLevels<Byte> v;
};
using LevelPage = BasicLevelPage<std::uint8_t>;
using ConstLevelPage = BasicLevelPage<const std::uint8_t>;

template <class Page, class Planes>
[[gnu::always_inline]] inline Page level_page(const LevelFormat& fmt, const Planes& planes) {
  using Levels = decltype(Page::k);
  int next = 0;
  const auto take = [&](int bits) -> Levels {
    const auto bytes = [&] { return reinterpret_cast<decltype(Levels::codes)>(planes.at[next++]); };
    const auto codes = bytes();
    const auto high = bits == 3 ? bytes() : nullptr;
    return {codes, high, bytes()};
  };
  const Levels k = take(fmt.k_bits);
  return {k, take(fmt.v_bits)};
}

// A code is a level plus its zero point.
constexpr float zero_point(int bits) {
  return float((1 << bits) - 1) / 2;
}

}  // namespace hack
