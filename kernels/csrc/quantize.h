// FP16 rows to codes, one byte per code, bit-equal to the definition in quantize.py.
#pragma once

#include "arena.h"
#include "hack_format.h"
#include "math.h"
#include "work.h"

namespace hack {

// Codes of up to one page of one KV head before packing, and their metadata as FP32 values that FP16 holds exactly.
struct RowCodes {
  std::uint8_t* codes;  // [n, D]
  float* minimum;       // K: [n, G]; V: [D]; with room for 16 more
  float* scale;
};

template <class S>
RowCodes take_codes(const HackFormat& fmt, std::size_t metadata, Arena<S>& arena) {
  return {arena.template take<std::uint8_t>(fmt.elements()), arena.template take<float>(metadata + kLanes),
          arena.template take<float>(metadata + kLanes)};
}

// Scales from ranges, in place: FP16 toward +inf of (max - min) / levels, 1 where that is 0. `n` is a multiple of 16.
template <class S>
void scales_from_maxima(float* maximum, const float* minimum, int n, int bits) {
  const float levels = float((1 << bits) - 1);
  std::uint16_t half[kLanes];
  for (int i = 0; i < n; i += kLanes) {
    const auto range = S::sub(S::load(maximum + i), S::load(minimum + i));
    S::store_half_up(half, S::div(range, S::splat(levels)));
    S::store(maximum + i, S::load_half(half));
    for (int j = i; j < i + kLanes; ++j) maximum[j] = maximum[j] == 0.0f ? 1.0f : maximum[j];
  }
}

template <class S>
void k_ranges(const HackFormat& fmt, const std::uint16_t* const* rows, int n, RowCodes& out) {
  const int groups = fmt.k_groups();
  for (int t = 0; t < n; ++t) {
    for (int g = 0; g < groups; ++g) {
      const std::uint16_t* x = rows[t] + g * fmt.k_partition;
      auto low = S::load_half(x), high = low;
      for (int d = kLanes; d < fmt.k_partition; d += kLanes) {
        const auto value = S::load_half(x + d);
        low = S::min(value, low);
        high = S::max(value, high);
      }
      out.minimum[t * groups + g] = S::reduce_min(low) + 0.0f;  // of two zeros the positive one
      out.scale[t * groups + g] = S::reduce_max(high);
    }
  }
  const int total = n * groups, padded = (total + kLanes - 1) / kLanes * kLanes;
  for (int i = total; i < padded; ++i) out.minimum[i] = out.scale[i] = 0.0f;
  scales_from_maxima<S>(out.scale, out.minimum, padded, fmt.k_bits);
}

template <class S>
void v_ranges(const HackFormat& fmt, const std::uint16_t* const* rows, int n, RowCodes& out) {
  for (int d = 0; d < fmt.head_dim; d += kLanes) {
    auto low = S::load_half(rows[0] + d), high = low;
    for (int t = 1; t < n; ++t) {
      const auto value = S::load_half(rows[t] + d);
      low = S::min(value, low);
      high = S::max(value, high);
    }
    S::store(out.minimum + d, S::add(low, S::zero()));
    S::store(out.scale + d, high);
  }
  scales_from_maxima<S>(out.scale, out.minimum, fmt.head_dim, fmt.v_bits);
}

// floor((x - m) / s + r) in true FP32 division, clamped to the levels; it is never negative.
template <class S>
[[gnu::always_inline]] inline void store_codes(std::uint8_t* out, const std::uint16_t* row, typename S::F low,
                                               typename S::F scale, typename S::F r, typename S::F levels) {
  const auto steps = S::add(S::div(S::sub(S::load_half(row), low), scale), r);
  S::store_low_bytes(out, S::truncate(S::min(steps, levels)));
}

template <class S>
void store_v_meta(const HackFormat& fmt, const RowCodes& v, const HackPage& page) {
  for (int d = 0; d < fmt.head_dim; d += kLanes) {
    S::store_half(page.v_min + d, S::load(v.minimum + d));
    S::store_half(page.v_scale + d, S::load(v.scale + d));
  }
}

template <class S>
typename S::F top_level(int bits) {
  return S::splat(float((1 << bits) - 1));
}

// use(channel, r of K, r of V) for the vectors of kNoiseChannels channels of token t.
template <class S, bool stochastic, class Use>
[[gnu::always_inline]] inline void with_rounding(const RoundKeys& keys, Place at, int t, int channel, Use use) {
  if constexpr (stochastic) {
    const Noise<S> r = noise<S>(keys, at.layer, at.head, at.position + t, channel);
    use(channel, r.k_low, r.v_low);
    use(channel + kLanes, r.k_high, r.v_high);
  } else {
    const auto half = S::splat(0.5f);
    use(channel, half, half);
    use(channel + kLanes, half, half);
  }
}

// K rows, each by itself; kNoiseChannels divides every partition. The format is passed by value: codes are bytes, so
// the compiler would have to assume that a store changes a format behind a reference.
template <class S, bool stochastic>
void round_k(HackFormat fmt, Place at, const std::uint16_t* const* rows, int n, RowCodes out) {
  using F = typename S::F;
  const RoundKeys keys = round_keys<S>(fmt.seed);
  const F levels = top_level<S>(fmt.k_bits);
  for (int t = 0, partition = 0; t < n; ++t) {
    for (int end = fmt.k_partition, d = 0; end <= fmt.head_dim; end += fmt.k_partition, ++partition) {
      const F low = S::splat(out.minimum[partition]), scale = S::splat(out.scale[partition]);
      for (; d < end; d += kNoiseChannels) {
        with_rounding<S, stochastic>(
            keys, at, t, d, [&](int channel, F r, F) __attribute__((always_inline)) {
              store_codes<S>(out.codes + t * fmt.head_dim + channel, rows[t] + channel, low, scale, r, levels);
            });
      }
    }
  }
}

// V rows of one page from its first row on; the rows of a channel are one partition.
template <class S, bool stochastic>
void round_v(HackFormat fmt, Place at, const std::uint16_t* const* rows, int n, RowCodes out) {
  using F = typename S::F;
  const RoundKeys keys = round_keys<S>(fmt.seed);
  const F levels = top_level<S>(fmt.v_bits);
  for (int t = 0; t < n; ++t) {
    for (int d = 0; d < fmt.head_dim; d += kNoiseChannels) {
      with_rounding<S, stochastic>(
          keys, at, t, d, [&](int channel, F, F r) __attribute__((always_inline)) {
            store_codes<S>(out.codes + t * fmt.head_dim + channel, rows[t] + channel, S::load(out.minimum + channel),
                           S::load(out.scale + channel), r, levels);
          });
    }
  }
}

// A whole page: each K row by itself, each V channel over the page.
template <class S, bool stochastic>
void round_page(HackFormat fmt, Place at, const std::uint16_t* const* k_rows, const std::uint16_t* const* v_rows,
                RowCodes k, RowCodes v) {
  using F = typename S::F;
  const RoundKeys keys = round_keys<S>(fmt.seed);
  const F k_levels = top_level<S>(fmt.k_bits), v_levels = top_level<S>(fmt.v_bits);
  for (int t = 0, partition = 0; t < fmt.page_tokens; ++t) {
    for (int end = fmt.k_partition, d = 0; end <= fmt.head_dim; end += fmt.k_partition, ++partition) {
      const F low = S::splat(k.minimum[partition]), scale = S::splat(k.scale[partition]);
      for (; d < end; d += kNoiseChannels) {
        with_rounding<S, stochastic>(
            keys, at, t, d, [&](int channel, F r_k, F r_v) __attribute__((always_inline)) {
              const int to = t * fmt.head_dim + channel;
              store_codes<S>(k.codes + to, k_rows[t] + channel, low, scale, r_k, k_levels);
              store_codes<S>(v.codes + to, v_rows[t] + channel, S::load(v.minimum + channel),
                             S::load(v.scale + channel), r_v, v_levels);
            });
      }
    }
  }
}

template <class S>
void quantize_k(const HackFormat& fmt, Place at, const std::uint16_t* const* rows, int n, RowCodes out) {
  k_ranges<S>(fmt, rows, n, out);
  (fmt.stochastic ? round_k<S, true> : round_k<S, false>)(fmt, at, rows, n, out);
}

template <class S>
void quantize_v(const HackFormat& fmt, Place at, const std::uint16_t* const* rows, int n, RowCodes out) {
  v_ranges<S>(fmt, rows, n, out);
  (fmt.stochastic ? round_v<S, true> : round_v<S, false>)(fmt, at, rows, n, out);
}

template <class S>
void quantize_page(const HackFormat& fmt, Place at, const std::uint16_t* const* k_rows,
                   const std::uint16_t* const* v_rows, RowCodes k, RowCodes v) {
  k_ranges<S>(fmt, k_rows, fmt.page_tokens, k);
  v_ranges<S>(fmt, v_rows, fmt.page_tokens, v);
  (fmt.stochastic ? round_page<S, true> : round_page<S, false>)(fmt, at, k_rows, v_rows, k, v);
}

}  // namespace hack
