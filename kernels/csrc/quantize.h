// FP16 rows to codes, one byte per code: the definition is quantize.py, and every bit agrees with it.
#pragma once

#include "format.h"
#include "math.h"
#include "work.h"

namespace hack {

// Codes of up to one page of one KV head before packing, and their metadata as FP32 values that FP16 holds exactly.
struct RowCodes {
  std::uint8_t* codes;  // [n, D]
  float* minimum;       // K: [n, G]; V: [D]
  float* scale;
};

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
void k_ranges(const Format& fmt, const std::uint16_t* const* rows, int n, RowCodes& out) {
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
void v_ranges(const Format& fmt, const std::uint16_t* const* rows, int n, RowCodes& out) {
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
void store_codes(std::uint8_t* out, typename S::F x, typename S::F low, typename S::F scale, typename S::F r,
                 int bits) {
  const auto steps = S::add(S::div(S::sub(x, low), scale), r);
  S::store_low_bytes(out, S::truncate(S::min(steps, S::splat(float((1 << bits) - 1)))));
}

// K rows, each by itself. `minimum` and `scale` have room for n·G rounded up to 16.
template <class S>
void quantize_k(const Format& fmt, Place at, const std::uint16_t* const* rows, int n, RowCodes out) {
  k_ranges<S>(fmt, rows, n, out);
  const RoundKeys keys = round_keys<S>(fmt.seed);
  const int groups = fmt.k_groups();
  for (int t = 0; t < n; ++t) {
    for (int d = 0; d < fmt.head_dim; d += kLanes) {
      const int partition = t * groups + d / fmt.k_partition;
      const auto r = fmt.stochastic ? noise<S>(keys, at.layer, at.head, at.position + t, d).k : S::splat(0.5f);
      store_codes<S>(out.codes + t * fmt.head_dim + d, S::load_half(rows[t] + d), S::splat(out.minimum[partition]),
                     S::splat(out.scale[partition]), r, fmt.k_bits);
    }
  }
}

// A whole page: K rows each by itself, V channels over the page. One Philox block serves both.
template <class S>
void quantize_page(const Format& fmt, Place at, const std::uint16_t* const* k_rows, const std::uint16_t* const* v_rows,
                   RowCodes k, RowCodes v) {
  k_ranges<S>(fmt, k_rows, fmt.page_tokens, k);
  v_ranges<S>(fmt, v_rows, fmt.page_tokens, v);
  const RoundKeys keys = round_keys<S>(fmt.seed);
  const int groups = fmt.k_groups();
  for (int t = 0; t < fmt.page_tokens; ++t) {
    for (int d = 0; d < fmt.head_dim; d += kLanes) {
      Noise<S> r{S::splat(0.5f), S::splat(0.5f)};
      if (fmt.stochastic) r = noise<S>(keys, at.layer, at.head, at.position + t, d);
      const int partition = t * groups + d / fmt.k_partition, at_code = t * fmt.head_dim + d;
      store_codes<S>(k.codes + at_code, S::load_half(k_rows[t] + d), S::splat(k.minimum[partition]),
                     S::splat(k.scale[partition]), r.k, fmt.k_bits);
      store_codes<S>(v.codes + at_code, S::load_half(v_rows[t] + d), S::load(v.minimum + d), S::load(v.scale + d), r.v,
                     fmt.v_bits);
    }
  }
}

}  // namespace hack
