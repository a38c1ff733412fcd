// Pages of deltas against anchor rows (Kind::kDeltas), the format DeltaFormat of Python. The rows of a page are cut into
// groups. The first row of a group is its anchor and has codes of its own; the others are kept as differences from it.
#pragma once

#include "packed_rows.h"

namespace hack {

using DeltaWidths = OneOf<4, 5>;

inline constexpr int kAnchorCentre = 127;  // the code of 0 in an anchor

// How the deltas of K or V are kept.
struct DeltaSide {
  int bits;
  int centre;  // the code of 0
};

struct DeltaFormat : PageFormat {
  DeltaSide k;
  DeltaSide v;
  int group;  // rows

  constexpr DeltaFormat(int head_dim, int page_tokens, DeltaSide k, DeltaSide v, int group)
      : PageFormat(Kind::kDeltas, head_dim, page_tokens), k(k), v(v), group(group) {
    add_side(k, "k_anchor", "k_codes", "k_high", "k_scale");
    add_side(v, "v_anchor", "v_codes", "v_high", "v_scale");
  }

  constexpr int anchors() const { return (page_tokens + group - 1) / group; }
  constexpr int others() const { return page_tokens - anchors(); }

 private:
  constexpr void add_side(const DeltaSide& side, const char* anchor, const char* codes, const char* high,
                          const char* scale) {
    add({anchor, Element::kByte, std::size_t(anchors() * head_dim)});
    add({codes, Element::kByte, packed_bytes(packed_low(side.bits))});
    if (packed_high(side.bits) != 0) add({high, Element::kByte, packed_bytes(packed_high(side.bits))});
    add({scale, Element::kHalf, std::size_t(page_tokens)});
  }
  // The last byte of a channel may hold fewer codes than fit.
  constexpr std::size_t packed_bytes(int width) const { return std::size_t((others() * width + 7) / 8 * head_dim); }
};

[[gnu::always_inline]] constexpr const DeltaFormat& as_deltas(const PageFormat& format) {
  return static_cast<const DeltaFormat&>(format);
}

// K or V of one page; `high` is null where the format has no such plane.
template <class Byte, class Half>
struct BasicDeltas {
  Byte* anchors;  // [A, D]
  Byte* codes;
  Byte* high;
  Half* scale;  // [Π]
};
using Deltas = BasicDeltas<std::uint8_t, std::uint16_t>;
using ConstDeltas = BasicDeltas<const std::uint8_t, const std::uint16_t>;

template <class Side>
struct DeltaSides {
  Side k;
  Side v;
};

template <class Side, class Planes>
[[gnu::always_inline]] inline DeltaSides<Side> delta_sides(const DeltaFormat& fmt, const Planes& planes) {
  using Byte = decltype(Side::codes);
  using Half = decltype(Side::scale);
  int next = 0;
  const auto take = [&](const DeltaSide& of) -> Side {
    const auto anchors = reinterpret_cast<Byte>(planes.at[next++]);
    const auto codes = reinterpret_cast<Byte>(planes.at[next++]);
    const auto high = packed_high(of.bits) != 0 ? reinterpret_cast<Byte>(planes.at[next++]) : nullptr;
    return {anchors, codes, high, reinterpret_cast<Half>(planes.at[next++])};
  };
  const Side k = take(fmt.k);
  return {k, take(fmt.v)};
}

}  // namespace hack
