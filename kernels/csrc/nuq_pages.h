// Kind::kNuq: codes are looked up among a layer's poles, outliers are put in their places, and keys are rotated to
// their positions (KVQuant). When a page is opened, it becomes FP32 rows in a thread's scratch memory. Queries read
// these rows.
#pragma once

#include <limits>

#include "nuq_format.h"
#include "rows.h"

namespace hack {

// Reads FP32 rows [Π, D].
template <class S>
struct WideRows {
  const float* rows;
  int d;

  [[gnu::always_inline]] typename S::F at(int t, int c) const { return S::load(rows + t * d + c); }
  [[gnu::always_inline]] void fetch(int, int) const {}
};

// z and r of vectors: the middle and half the width of the range lo .. hi.
struct NuqReach {
  float* middle;
  float* reach;
};

template <class S>
[[gnu::always_inline]] inline void set_reach(const NuqReach& to, int i, float low, float high) {
  to.middle[i] = (high + low) * 0.5f;
  to.reach[i] = (high - low) * 0.5f;
}

// Sets z and r of the vectors of K or V of a page. `head` counts the heads of the model.
template <class S>
void read_reach(const NuqFormat& fmt, const NuqSide& of, const std::uint16_t* range, int head, const NuqReach& to) {
  const int count = fmt.vectors(of);
  if (of.ranged) {
    for (int i = 0; i < count; ++i) set_reach<S>(to, i, half_to_float(range[i]), half_to_float(range[count + i]));
  } else {
    const float* low = fmt.tables.k_range + std::size_t(head) * count;
    const float* high = low + std::size_t(fmt.known_heads) * count;
    for (int i = 0; i < count; ++i) set_reach<S>(to, i, low[i], high[i]);
  }
}

// pole·r + z for all values of K or V of a page; the next page's codes are prefetched.
template <class S, int bits>
void look_up_rows(const NuqFormat& fmt, const NuqSide& of, const ConstNuq& side, const ConstNuq& next,
                  const NuqReach& from, float* rows) {
  const int d = fmt.head_dim;
  const PackedRows<S, bits> codes{side.codes, side.high, d}, later{next.codes, next.high, d};
  const auto poles = S::load(of.poles);
  for (int t = 0; t < fmt.page_tokens; ++t) {
    for (int c = 0; c < d; c += kLanes) {
      const auto pole = S::look_up(poles, codes.at(t, c));
      later.fetch(t, c);
      const auto reach = of.by_channel ? S::load(from.reach + c) : S::splat(from.reach[t]);
      const auto middle = of.by_channel ? S::load(from.middle + c) : S::splat(from.middle[t]);
      S::store(rows + std::size_t(t) * d + c, S::fma(pole, reach, middle));
    }
  }
}

// A page that came over a wire may name any place. A place outside counts as the last.
template <class S>
void put_outliers(const NuqFormat& fmt, const NuqSide& of, const ConstNuq& side, float* rows) {
  const int count = fmt.vectors(of), d = fmt.head_dim, last = (of.by_channel ? fmt.page_tokens : d) - 1;
  for (int i = 0; i < kOutliers * count; ++i) {
    const int vector = i % count, at = side.at[i] < last ? side.at[i] : last;
    rows[of.by_channel ? at * d + vector : vector * d + at] = half_to_float(side.out[i]);
  }
}

// Applies the rotary embedding to a page's rows, in channel pairs (i, i + D/2).
template <class S>
void turn_rows(const NuqFormat& fmt, float first, float* rows) {
  const int half = fmt.head_dim / 2;
  alignas(64) float cos[kMaxHeadDim / 2], sin[kMaxHeadDim / 2];
  for (int i = 0; i < half; ++i) {
    const double angle = double(first) * double(fmt.tables.frequencies[i]);
    cos[i] = float(std::cos(angle));
    sin[i] = float(std::sin(angle));
  }
  for (int t = 0; t < fmt.page_tokens; ++t) {
    const float* turn = fmt.tables.row_turns + std::size_t(t) * 2 * half;
    float* row = rows + std::size_t(t) * 2 * half;
    for (int c = 0; c < half; c += kLanes) {
      const auto c0 = S::load(cos + c), s0 = S::load(sin + c), c1 = S::load(turn + c), s1 = S::load(turn + half + c);
      const auto both_cos = S::sub(S::mul(c0, c1), S::mul(s0, s1)), both_sin = S::fma(s0, c1, S::mul(c0, s1));
      const auto low = S::load(row + c), high = S::load(row + half + c);
      S::store(row + c, S::sub(S::mul(low, both_cos), S::mul(high, both_sin)));
      S::store(row + half + c, S::fma(high, both_cos, S::mul(low, both_sin)));
    }
  }
}

template <class S>
class NuqPages {
 public:
  static constexpr int kRestingRows = 12;

  NuqPages(const PageFormat& format, const Pool& pool, int head, Arena<S>& arena)
      : fmt_(as_nuq(format)),
        pool_(pool),
        head_(head),
        k_(arena.template take<float>(fmt_.elements())),
        v_(arena.template take<float>(fmt_.elements())),
        reach_{arena.template take<float>(most_vectors()), arena.template take<float>(most_vectors())} {}

  void open(std::int64_t id, std::int64_t next) {
    const auto page = nuq_sides<ConstNuq>(fmt_, pool_.page(fmt_, id, head_));
    const auto later = nuq_sides<ConstNuq>(fmt_, pool_.page(fmt_, next, head_));
    widen(fmt_.k, page.k, later.k, k_);
    if (page.k.first != nullptr) turn_rows<S>(fmt_, *page.k.first, k_);
    widen(fmt_.v, page.v, later.v, v_);
  }
  template <class Use>
  [[gnu::always_inline]] void with_keys(Use use) const {
    const WideRows<S> rows{k_, fmt_.head_dim};
    use(rows, rows);
  }
  template <class Use>
  [[gnu::always_inline]] void with_values(Use use) const {
    const WideRows<S> rows{v_, fmt_.head_dim};
    use(rows, rows);
  }

 private:
  std::size_t most_vectors() const { return std::size_t(std::max(fmt_.head_dim, fmt_.page_tokens)); }

  void widen(const NuqSide& of, const ConstNuq& side, const ConstNuq& next, float* rows) const {
    read_reach<S>(fmt_, of, side.range, pool_.head_start + head_, reach_);
    NuqWidths::with(of.bits, [&](auto bits) { look_up_rows<S, bits>(fmt_, of, side, next, reach_, rows); });
    put_outliers<S>(fmt_, of, side, rows);
  }

  const NuqFormat& fmt_;
  const Pool& pool_;
  int head_;
  float *k_, *v_;
  NuqReach reach_;
};

// For each column of x [n, d]: the rows of its least and its largest value, and the range of its other values.
template <class S>
void find_in_channels(const float* __restrict x, int n, int d, std::int32_t* __restrict least_at,
                      std::int32_t* __restrict most_at, float* __restrict low, float* __restrict high) {
  alignas(64) float least[kMaxHeadDim], most[kMaxHeadDim];
  for (int c = 0; c < d; ++c) {
    least[c] = most[c] = x[c];
    least_at[c] = most_at[c] = 0;
    low[c] = std::numeric_limits<float>::infinity();
    high[c] = -low[c];
  }
  for (int t = 1; t < n; ++t) {
    const float* row = x + std::size_t(t) * d;
    for (int c = 0; c < d; ++c) {
      const bool under = row[c] < least[c], over = row[c] > most[c];
      least[c] = under ? row[c] : least[c];
      least_at[c] = under ? t : least_at[c];
      most[c] = over ? row[c] : most[c];
      most_at[c] = over ? t : most_at[c];
    }
  }
  for (int t = 0; t < n; ++t) {
    const float* row = x + std::size_t(t) * d;
    for (int c = 0; c < d; ++c) {
      const bool aside = (t == least_at[c]) | (t == most_at[c]);
      low[c] = !aside & (row[c] < low[c]) ? row[c] : low[c];
      high[c] = !aside & (row[c] > high[c]) ? row[c] : high[c];
    }
  }
}

// Does what `find_in_channels` does, for one vector that is a row [d].
template <class S>
void find_in_row(const float* x, int d, std::int32_t* least_at, std::int32_t* most_at, float* low, float* high) {
  int least = 0, most = 0;
  for (int c = 1; c < d; ++c) {
    least = x[c] < x[least] ? c : least;
    most = x[c] > x[most] ? c : most;
  }
  *low = std::numeric_limits<float>::infinity();
  *high = -*low;
  for (int c = 0; c < d; ++c) {
    const bool aside = (c == least) | (c == most);
    *low = !aside & (x[c] < *low) ? x[c] : *low;
    *high = !aside & (x[c] > *high) ? x[c] : *high;
  }
  *least_at = least;
  *most_at = most;
}

// For each column of x [n, d]: the row of the value farthest from `middle`. Row `left_out` does not count.
template <class S>
void find_farthest(const float* __restrict x, int n, int d, const float* __restrict middle,
                   const std::int32_t* __restrict left_out, std::int32_t* __restrict at) {
  alignas(64) float most[kMaxHeadDim];
  for (int c = 0; c < d; ++c) {
    most[c] = -1.0f;
    at[c] = 0;
  }
  for (int t = 0; t < n; ++t) {
    const float* row = x + std::size_t(t) * d;
    for (int c = 0; c < d; ++c) {
      const float far = t == left_out[c] ? -1.0f : std::fabs(row[c] - middle[c]);
      at[c] = far > most[c] ? t : at[c];
      most[c] = far > most[c] ? far : most[c];
    }
  }
}

// Codes [n, d] of x [n, d]: the number of bounds z + r·(the middle of two poles) below the value.
template <class S>
void count_bounds(const NuqFormat& fmt, const NuqSide& of, const float* __restrict x, const NuqReach& from,
                  std::uint8_t* __restrict codes) {
  const int d = fmt.head_dim, bounds = (1 << of.bits) - 1;
  alignas(64) float limits[kMostPoles][kMaxHeadDim];
  for (int t = 0; t < fmt.page_tokens; ++t, x += d, codes += d) {
    for (int b = 0; b < bounds && (t == 0 || !of.by_channel); ++b) {
      const float between = (of.poles[b + 1] + of.poles[b]) * 0.5f;
      for (int c = 0; c < d; ++c) {
        const int i = of.by_channel ? c : t;
        limits[b][c] = from.middle[i] + from.reach[i] * between;
      }
    }
    alignas(64) std::int32_t counts[kMaxHeadDim] = {};
    for (int b = 0; b < bounds; ++b)
      for (int c = 0; c < d; ++c) counts[c] += x[c] > limits[b][c];
    for (int c = 0; c < d; ++c) codes[c] = std::uint8_t(counts[c]);
  }
}

// Quantizes K or V of a page; reference/nuq.py has the definition.
template <class S>
void quantize_nuq(const NuqFormat& fmt, const NuqSide& of, Place place, const std::uint16_t* rows, const Nuq& to,
                  Arena<S> arena) {
  const int n = fmt.page_tokens, d = fmt.head_dim, count = fmt.vectors(of);
  float* x = arena.template take<float>(fmt.elements());
  auto* codes = arena.template take<std::uint8_t>(fmt.elements());
  alignas(64) float low[kMaxHeadDim], high[kMaxHeadDim], middle[kMaxHeadDim], reach[kMaxHeadDim];
  alignas(64) std::int32_t at[2 * kMaxHeadDim];
  for (std::size_t i = 0; i < fmt.elements(); i += kLanes) S::store(x + i, S::load_half(rows + i));
  const NuqReach from{middle, reach};
  if (of.ranged) {
    if (of.by_channel) {
      find_in_channels<S>(x, n, d, at, at + count, low, high);
    } else {
      for (int t = 0; t < n; ++t) find_in_row<S>(x + std::size_t(t) * d, d, at + t, at + count + t, low + t, high + t);
    }
    for (int i = 0; i < count; ++i) {
      to.range[i] = float_to_half(low[i] + 0.0f);  // no -0
      to.range[count + i] = float_to_half(high[i] + 0.0f);
    }
    read_reach<S>(fmt, of, to.range, place.head, from);
  } else {
    read_reach<S>(fmt, of, nullptr, place.head, from);
    std::fill(at + count, at + 2 * count, -1);
    find_farthest<S>(x, n, d, middle, at + count, at);
    find_farthest<S>(x, n, d, middle, at, at + count);
    *to.first = float(place.position);
  }
  for (int i = 0; i < kOutliers * count; ++i) {
    to.at[i] = std::uint8_t(at[i]);
    to.out[i] = rows[of.by_channel ? at[i] * d + i % count : i % count * d + at[i]];
  }
  count_bounds<S>(fmt, of, x, from, codes);
  pack_rows<S>(codes, n, d, of.bits, to.codes, to.high);
}

template <class S>
void seal_nuq(const PageFormat& format, Place place, const std::uint16_t* k, const std::uint16_t* v,
              const Planes& planes, std::byte* scratch) {
  const NuqFormat& fmt = as_nuq(format);
  const auto page = nuq_sides<Nuq>(fmt, planes);
  quantize_nuq<S>(fmt, fmt.k, place, k, page.k, Arena<S>(scratch));
  quantize_nuq<S>(fmt, fmt.v, place, v, page.v, Arena<S>(scratch));
}

template <class S>
constexpr std::size_t nuq_scratch_bytes(const PageFormat& format, int rows) {
  const std::size_t reach = 8 * std::size_t(std::max(format.head_dim, format.page_tokens));
  return rows_scratch_bytes<S>(format, rows) + reach + 8 * format.elements() + 64 * 6;
}

template <class S>
constexpr PageOperations nuq_operations() {
  return reading_operations<S, NuqPages<S>>(seal_nuq<S>, nuq_scratch_bytes<S>);
}

}  // namespace hack
