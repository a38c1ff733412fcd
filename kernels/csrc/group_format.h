// Pages of integer codes in groups (Kind::kGroups), the format GroupFormat of Python: x^ = s·c + m, where a group of
// values shares s and m. A group is some rows of one channel, or some channels of one row.
#pragma once

#include "packed_rows.h"

namespace hack {

using ChannelGroupWidths = OneOf<2, 4>;
using TokenGroupWidths = OneOf<2, 4, 5>;

// How K or V is kept.
struct Grouped {
  int bits;
  bool by_channel;  // a group is `group` rows of a channel; else `group` channels of a row
  int group;
  int centre;  // 0: a group has a minimum; else code `centre` stands for 0, and a step is the stored scale / centre

  constexpr int levels() const { return centre != 0 ? 2 * centre : (1 << bits) - 1; }
};

struct GroupFormat : PageFormat {
  Grouped k;
  Grouped v;

  constexpr GroupFormat(int head_dim, int page_tokens, Grouped k, Grouped v)
      : PageFormat(Kind::kGroups, head_dim, page_tokens), k(k), v(v) {
    add_side(k, "k_codes", "k_high", "k_scale", "k_min");
    add_side(v, "v_codes", "v_high", "v_scale", "v_min");
  }

  constexpr std::size_t groups(const Grouped& side) const { return elements() / std::size_t(side.group); }

 private:
  constexpr void add_side(const Grouped& side, const char* codes, const char* high, const char* scale,
                          const char* minimum) {
    add({codes, Element::kByte, elements() * packed_low(side.bits) / 8});
    if (packed_high(side.bits) != 0) add({high, Element::kByte, elements() * packed_high(side.bits) / 8});
    add({scale, Element::kHalf, groups(side)});
    if (side.centre == 0) add({minimum, Element::kHalf, groups(side)});
  }
};

[[gnu::always_inline]] constexpr const GroupFormat& as_groups(const PageFormat& format) {
  return static_cast<const GroupFormat&>(format);
}

// K or V of one page; null where the format has no such plane. Scales and minima are [Π / group, D] or [Π, D / group].
template <class Byte, class Half>
struct BasicGroups {
  Byte* codes;
  Byte* high;
  Half* scale;
  Half* minimum;
};
using Groups = BasicGroups<std::uint8_t, std::uint16_t>;
using ConstGroups = BasicGroups<const std::uint8_t, const std::uint16_t>;

template <class Side>
struct GroupSides {
  Side k;
  Side v;
};

template <class Side, class Planes>
[[gnu::always_inline]] inline GroupSides<Side> group_sides(const GroupFormat& fmt, const Planes& planes) {
  using Byte = decltype(Side::codes);
  using Half = decltype(Side::scale);
  int next = 0;
  const auto take = [&](const Grouped& of) -> Side {
    const auto codes = reinterpret_cast<Byte>(planes.at[next++]);
    const auto high = packed_high(of.bits) != 0 ? reinterpret_cast<Byte>(planes.at[next++]) : nullptr;
    const auto scale = reinterpret_cast<Half>(planes.at[next++]);
    return {codes, high, scale, of.centre == 0 ? reinterpret_cast<Half>(planes.at[next++]) : nullptr};
  };
  const Side k = take(fmt.k);
  return {k, take(fmt.v)};
}

}  // namespace hack
