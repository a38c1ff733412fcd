// Pages of codes on non-uniform levels with outliers aside (Kind::kNuq), the format NuqFormat of Python. x^ = pole·r +
// z, with z and r from the range of a vector. A vector is the rows of a channel of K, or the channels of a row of V.
#pragma once

#include "packed_rows.h"

namespace hack {

using NuqWidths = OneOf<2, 3, 4>;

inline constexpr int kMostPoles = 16;
inline constexpr int kOutliers = 2;  // of a vector

// How K or V is kept.
struct NuqSide {
  int bits;
  bool by_channel;
  bool ranged;  // pages hold the ranges of vectors
  float poles[kMostPoles];  // 2^bits, ascending, and zeros
};

// Tables of a calibrated format. Null: pages hold the range of K, and K rests as the model has it, rotated.
struct NuqTables {
  const float* k_range;      // [2, known_heads, D]: lo and hi
  const float* row_turns;    // [Π, D]: cosines, then sines, of each row's rotation relative to the page's first row
  const float* frequencies;  // [D/2]: radians from row to row
};

struct NuqFormat : PageFormat {
  NuqSide k;
  NuqSide v;
  NuqTables tables;

  constexpr NuqFormat(int head_dim, int page_tokens, const NuqSide& k, const NuqSide& v, const NuqTables& tables,
                      std::int64_t heads)
      : PageFormat(Kind::kNuq, head_dim, page_tokens), k(k), v(v), tables(tables) {
    known_heads = heads;
    constexpr const char* names[2][6] = {{"k_codes", "k_high", "k_range", "k_at", "k_out", "k_first"},
                                         {"v_codes", "v_high", "v_range", "v_at", "v_out", "v_first"}};
    for (int i = 0; i < 2; ++i) {
      const NuqSide& side = i == 0 ? k : v;
      const std::size_t aside = std::size_t(kOutliers * vectors(side));
      add({names[i][0], Element::kByte, elements() * packed_low(side.bits) / 8});
      if (packed_high(side.bits) != 0) add({names[i][1], Element::kByte, elements() * packed_high(side.bits) / 8});
      if (side.ranged) add({names[i][2], Element::kHalf, std::size_t(2 * vectors(side))});
      add({names[i][3], Element::kByte, aside});
      add({names[i][4], Element::kHalf, aside});
      if (!side.ranged) add({names[i][5], Element::kFloat, 1});
    }
  }

  constexpr int vectors(const NuqSide& side) const { return side.by_channel ? head_dim : page_tokens; }
};

[[gnu::always_inline]] constexpr const NuqFormat& as_nuq(const PageFormat& format) {
  return static_cast<const NuqFormat&>(format);
}

// K or V of one page; null where the format has no such plane.
template <class Byte, class Half, class Float>
struct BasicNuq {
  Byte* codes;
  Byte* high;
  Half* range;  // lo of all vectors, then hi
  Byte* at;     // the outliers of rank 0 of all vectors, then those of rank 1
  Half* out;
  Float* first;
};
using Nuq = BasicNuq<std::uint8_t, std::uint16_t, float>;
using ConstNuq = BasicNuq<const std::uint8_t, const std::uint16_t, const float>;

template <class Side>
struct NuqSides {
  Side k;
  Side v;
};

template <class Side, class Planes>
[[gnu::always_inline]] inline NuqSides<Side> nuq_sides(const NuqFormat& fmt, const Planes& planes) {
  using Byte = decltype(Side::codes);
  using Half = decltype(Side::range);
  using Float = decltype(Side::first);
  int next = 0;
  const auto take = [&](const NuqSide& of) -> Side {
    const auto codes = reinterpret_cast<Byte>(planes.at[next++]);
    const auto high = packed_high(of.bits) != 0 ? reinterpret_cast<Byte>(planes.at[next++]) : nullptr;
    const auto range = of.ranged ? reinterpret_cast<Half>(planes.at[next++]) : nullptr;
    const auto at = reinterpret_cast<Byte>(planes.at[next++]);
    const auto out = reinterpret_cast<Half>(planes.at[next++]);
    return {codes, high, range, at, out, of.ranged ? nullptr : reinterpret_cast<Float>(planes.at[next++])};
  };
  const Side k = take(fmt.k);
  return {k, take(fmt.v)};
}

}  // namespace hack
