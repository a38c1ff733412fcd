// Kind::kGroups: codes that become s·c + m when they are read, as in the rivals' papers (KIVI; CacheGen's bins).
#pragma once

#include "group_format.h"
#include "rows.h"

namespace hack {

template <class S, int bits, bool by_channel>
struct GroupRows {
  PackedRows<S, bits> codes;
  const float* scale;
  const float* minimum;
  int row_groups;  // by channel: D; else D / group
  int shift;       // group = row (by channel) or channel (by row) >> shift

  [[gnu::always_inline]] typename S::F at(int t, int c) const {
    const auto code = S::bytes_to_float(codes.at(t, c));
    if constexpr (by_channel) {
      const int i = (t >> shift) * row_groups + c;
      return S::fma(code, S::load(scale + i), S::load(minimum + i));
    } else {
      const int i = t * row_groups + (c >> shift);
      return S::fma(code, S::splat(scale[i]), S::splat(minimum[i]));
    }
  }
  [[gnu::always_inline]] void fetch(int t, int c) const { codes.fetch(t, c); }
};

// Scales and minima of one of K and V of a page, in FP32.
struct GroupFactors {
  float* scale;
  float* minimum;
};

template <class S>
void read_factors(const GroupFormat& fmt, const Grouped& of, const ConstGroups& side, const GroupFactors& to) {
  const int count = int(fmt.groups(of));
  if (of.centre == 0) {
    for (int i = 0; i < count; ++i) to.minimum[i] = half_to_float(side.minimum[i]);
    for (int i = 0; i < count; ++i) to.scale[i] = half_to_float(side.scale[i]);
  } else {
    for (int i = 0; i < count; ++i) {
      const float most = half_to_float(side.scale[i]);
      to.minimum[i] = -most;
      to.scale[i] = most / float(of.centre);
    }
  }
}

template <class S>
class GroupPages {
 public:
  static constexpr int kRestingRows = 8;

  GroupPages(const PageFormat& format, const Pool& pool, int head, Arena<S>& arena)
      : fmt_(as_groups(format)),
        pool_(pool),
        head_(head),
        k_{take(arena, fmt_.k), take(arena, fmt_.k)},
        v_{take(arena, fmt_.v), take(arena, fmt_.v)} {}

  void open(std::int64_t id, std::int64_t next) {
    page_ = group_sides<ConstGroups>(fmt_, pool_.page(fmt_, id, head_));
    next_ = group_sides<ConstGroups>(fmt_, pool_.page(fmt_, next, head_));
    read_factors<S>(fmt_, fmt_.k, page_.k, k_);
    read_factors<S>(fmt_, fmt_.v, page_.v, v_);
  }
  template <class Use>
  [[gnu::always_inline]] void with_keys(Use use) const {
    with_readers(fmt_.k, page_.k, next_.k, k_, use);
  }
  template <class Use>
  [[gnu::always_inline]] void with_values(Use use) const {
    with_readers(fmt_.v, page_.v, next_.v, v_, use);
  }

 private:
  float* take(Arena<S>& arena, const Grouped& of) {
    return arena.template take<float>(fmt_.groups(of));
  }

  template <class Use>
  [[gnu::always_inline]] void with_readers(const Grouped& of, const ConstGroups& side, const ConstGroups& next,
                                           const GroupFactors& factors, Use use) const {
    const int d = fmt_.head_dim;
    const auto with = [&](auto bits, auto by_channel) __attribute__((always_inline)) {
      const auto reader = [&](const ConstGroups& codes) -> GroupRows<S, bits, by_channel> {
        // A group that is a whole row may have any length; a shift by 31 gives it the number 0.
        const int shift = of.group == d && !by_channel ? 31 : std::countr_zero(unsigned(of.group));
        return {{codes.codes, codes.high, d}, factors.scale, factors.minimum, by_channel ? d : d / of.group, shift};
      };
      use(reader(side), reader(next));
    };
    if (of.by_channel) {
      ChannelGroupWidths::with(of.bits, [&](auto bits) __attribute__((always_inline)) { with(bits, std::true_type{}); });
    } else {
      TokenGroupWidths::with(of.bits, [&](auto bits) __attribute__((always_inline)) { with(bits, std::false_type{}); });
    }
  }

  const GroupFormat& fmt_;
  const Pool& pool_;
  int head_;
  GroupFactors k_, v_;
  GroupSides<ConstGroups> page_{}, next_{};
};

// Codes of 16 channels of a row, where x = low + step · code: to nearest, halves up.
template <class S>
[[gnu::always_inline]] inline void store_codes(typename S::F x, typename S::F low, typename S::F step, float levels,
                                               std::uint8_t* codes) {
  const auto steps = S::floor(S::add(S::div(S::sub(x, low), step), S::splat(0.5f)));
  S::store_low_bytes(codes, S::truncate(S::max(S::min(steps, S::splat(levels)), S::zero())));
}

// (high - low) / levels in FP16, rounded up so that no code exceeds the levels; 1 where all values are equal.
template <class S>
void store_scales(const float* low, const float* high, int count, float levels, std::uint16_t* scale) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes)
    S::store_half_up(scale + i, S::div(S::sub(S::load(high + i), S::load(low + i)), S::splat(levels)));
  for (; i < count; ++i) scale[i] = float_to_half_up((high[i] - low[i]) / levels);
  for (i = 0; i < count; ++i) scale[i] = (scale[i] & 0x7FFF) == 0 ? std::uint16_t(0x3C00) : scale[i];  // -0 too
}

template <class S>
void quantize_by_channel(const GroupFormat& fmt, const Grouped& of, const std::uint16_t* rows, const Groups& to,
                         std::uint8_t* codes) {
  const int d = fmt.head_dim;
  alignas(64) float low[kMaxHeadDim], high[kMaxHeadDim];
  for (int g = 0; g < fmt.page_tokens / of.group; ++g) {
    const std::uint16_t* first = rows + std::size_t(g) * of.group * d;
    for (int c = 0; c < d; c += kLanes) {
      auto least = S::load_half(first + c), most = least;
      for (int t = 1; t < of.group; ++t) {
        const auto x = S::load_half(first + t * d + c);
        least = S::min(x, least);
        most = S::max(x, most);
      }
      S::store(low + c, S::add(least, S::zero()));  // no -0
      S::store(high + c, most);
    }
    store_scales<S>(low, high, d, float(of.levels()), to.scale + g * d);
    for (int c = 0; c < d; c += kLanes) {
      S::store_half(to.minimum + g * d + c, S::load(low + c));
      const auto step = S::load_half(to.scale + g * d + c);
      for (int t = 0; t < of.group; ++t)
        store_codes<S>(S::load_half(first + t * d + c), S::load(low + c), step, float(of.levels()),
                       codes + (std::size_t(g) * of.group + t) * d + c);
    }
  }
}

template <class S>
void quantize_by_token(const GroupFormat& fmt, const Grouped& of, const std::uint16_t* rows, const Groups& to,
                       std::uint8_t* codes) {
  const int d = fmt.head_dim, count = d / of.group;
  alignas(64) float low[kMaxHeadDim], high[kMaxHeadDim];
  for (int t = 0; t < fmt.page_tokens; ++t) {
    const std::uint16_t* row = rows + std::size_t(t) * d;
    std::uint16_t *scale = to.scale + t * count, *minimum = to.minimum + t * count;
    for (int g = 0; g < count; ++g) {
      const std::uint16_t* first = row + g * of.group;
      auto least = S::load_half(first), most = least;
      for (int c = kLanes; c < of.group; c += kLanes) {
        least = S::min(S::load_half(first + c), least);
        most = S::max(S::load_half(first + c), most);
      }
      low[g] = S::reduce_min(least) + 0.0f;  // no -0
      high[g] = S::reduce_max(most);
    }
    store_scales<S>(low, high, count, float(of.levels()), scale);
    for (int g = 0; g < count; ++g) {
      minimum[g] = float_to_half(low[g]);
      const auto step = S::splat(half_to_float(scale[g])), least = S::splat(low[g]);
      for (int c = g * of.group; c < (g + 1) * of.group; c += kLanes)
        store_codes<S>(S::load_half(row + c), least, step, float(of.levels()), codes + std::size_t(t) * d + c);
    }
  }
}

// Codes around `centre`: to nearest, ties to even. A row's step is its largest magnitude divided by `centre`.
template <class S>
void quantize_centred(const GroupFormat& fmt, const Grouped& of, const std::uint16_t* rows, const Groups& to,
                      std::uint8_t* codes) {
  const int d = fmt.head_dim;
  alignas(64) float x[kMaxHeadDim];
  for (int t = 0; t < fmt.page_tokens; ++t) {
    for (int c = 0; c < d; c += kLanes) S::store(x + c, S::load_half(rows + std::size_t(t) * d + c));
    const float most = largest_magnitude<S>(x, d), largest = most == 0.0f ? 1.0f : most;
    to.scale[t] = float_to_half(largest);
    store_around<S>(x, d, of.centre, largest, codes + std::size_t(t) * d);
  }
}

// Quantizes K or V of a page; reference/groups.py has the definition.
template <class S>
void quantize_groups(const GroupFormat& fmt, const Grouped& of, const std::uint16_t* rows, const Groups& to,
                     Arena<S> arena) {
  auto* codes = arena.template take<std::uint8_t>(fmt.elements());
  if (of.centre != 0) {
    quantize_centred<S>(fmt, of, rows, to, codes);
  } else if (of.by_channel) {
    quantize_by_channel<S>(fmt, of, rows, to, codes);
  } else {
    quantize_by_token<S>(fmt, of, rows, to, codes);
  }
  pack_rows<S>(codes, fmt.page_tokens, fmt.head_dim, of.bits, to.codes, to.high);
}

template <class S>
void seal_groups(const PageFormat& format, Place, const std::uint16_t* k, const std::uint16_t* v, const Planes& planes,
                 std::byte* scratch) {
  const GroupFormat& fmt = as_groups(format);
  const auto page = group_sides<Groups>(fmt, planes);
  quantize_groups<S>(fmt, fmt.k, k, page.k, Arena<S>(scratch));
  quantize_groups<S>(fmt, fmt.v, v, page.v, Arena<S>(scratch));
}

template <class S>
constexpr std::size_t group_scratch_bytes(const PageFormat& format, int rows) {
  const GroupFormat& fmt = as_groups(format);
  const std::size_t factors = 8 * (fmt.groups(fmt.k) + fmt.groups(fmt.v));
  return rows_scratch_bytes<S>(format, rows) + factors + 64 * 6;
}

template <class S>
constexpr PageOperations group_operations() {
  return reading_operations<S, GroupPages<S>>(seal_groups<S>, group_scratch_bytes<S>);
}

}  // namespace hack
