// Operations of a model on single rows between its matrix products; the definitions are in rowwise.py. Rows have any
// length and the model's dtype. Arithmetic is FP32. A row's result does not depend on the rows beside it.
#pragma once

#include <bit>
#include <cstring>

#include "half.h"
#include "math.h"
#include "work.h"

namespace hack {

// The last values of a row, fewer than a vector has lanes; the rest of x becomes zeros. Not inlined, as is
// store_last_values, since they are rarely called; and they take no vector, which a call would pass, and so keep, in
// memory.
template <Dtype dtype>
[[gnu::noinline]] void load_last_values(const std::byte* row, int at, int n, float* x) {
  for (int i = 0; i < kLanes; ++i) {
    if (i >= n - at) x[i] = 0.0f;
    else if constexpr (dtype == Dtype::kFloat) x[i] = reinterpret_cast<const float*>(row)[at + i];
    else if constexpr (dtype == Dtype::kHalf) x[i] = half_to_float(reinterpret_cast<const std::uint16_t*>(row)[at + i]);
    else x[i] = bfloat_to_float(reinterpret_cast<const std::uint16_t*>(row)[at + i]);
  }
}

template <Dtype dtype>
[[gnu::noinline]] void store_last_values(std::byte* row, int at, int n, const float* x) {
  for (int i = 0; i < n - at; ++i) {
    if constexpr (dtype == Dtype::kFloat) reinterpret_cast<float*>(row)[at + i] = x[i];
    else reinterpret_cast<std::uint16_t*>(row)[at + i] = dtype == Dtype::kHalf ? float_to_half(x[i]) : float_to_bfloat(x[i]);
  }
}

// Lanes from `at` on of a row of n values; zeros past its end.
template <class S, Dtype dtype, int lanes = kLanes>
[[gnu::always_inline]] inline typename S::F load_lanes(const std::byte* row, int at, int n) {
  if (n - at < lanes) {
    alignas(64) float x[kLanes];
    load_last_values<dtype>(row, at, n, x);
    return S::load(x);
  }
  if constexpr (dtype == Dtype::kFloat) return S::load(reinterpret_cast<const float*>(row) + at);
  const auto* values = reinterpret_cast<const std::uint16_t*>(row) + at;
  return dtype == Dtype::kHalf ? S::load_half(values) : S::load_bfloat(values);
}

template <class S, Dtype dtype>
[[gnu::always_inline]] inline void store_lanes(std::byte* row, int at, int n, typename S::F lanes) {
  if (n - at < kLanes) {
    alignas(64) float x[kLanes];
    S::store(x, lanes);
    return store_last_values<dtype>(row, at, n, x);
  }
  if constexpr (dtype == Dtype::kFloat) return S::store(reinterpret_cast<float*>(row) + at, lanes);
  auto* values = reinterpret_cast<std::uint16_t*>(row) + at;
  dtype == Dtype::kHalf ? S::store_half(values, lanes) : S::store_bfloat(values, lanes);
}

// Rounds n values to FP16; returns whether all of them are finite.
template <class S, Dtype dtype>
bool round_row(const std::byte* row, int n, std::uint16_t* out) {
  for (int i = 0; i < n; i += kLanes)
    store_lanes<S, Dtype::kHalf>(reinterpret_cast<std::byte*>(out), i, n, load_lanes<S, dtype>(row, i, n));
  bool finite = true;
  for (int i = 0; i < n; ++i) finite &= (out[i] & 0x7C00u) != 0x7C00u;
  return finite;
}

// n values in FP32, rounded to FP16 first if `rounded`; zeros up to whole vectors.
template <class S, Dtype dtype>
void widen_row(const std::byte* row, int n, bool rounded, float* out) {
  for (int i = 0; i < n; i += kLanes) {
    auto lanes = load_lanes<S, dtype>(row, i, n);
    if (rounded) {
      alignas(64) std::uint16_t halves[kLanes];
      S::store_half(halves, lanes);
      lanes = S::load_half(halves);
    }
    S::store(out + i, lanes);
  }
}

// n values in FP32, rounded to the row's dtype.
template <class S, Dtype dtype>
void narrow_row(const float* row, int n, std::byte* out) {
  const auto* values = reinterpret_cast<const std::byte*>(row);
  for (int i = 0; i < n; i += kLanes) store_lanes<S, dtype>(out, i, n, load_lanes<S, Dtype::kFloat>(values, i, n));
}

// Rotates the pairs (i, i + D/2) of every head [D] of a row by `turn`, which is cos [D/2] and then sin [D/2].
template <class S, Dtype dtype>
void rotate_row(std::byte* row, int heads, int head_dim, const float* turn) {
  const int half = head_dim / 2;
  const auto* angles = reinterpret_cast<const std::byte*>(turn);
  const std::size_t half_bytes = std::size_t(half) * bytes_of(dtype);
  for (int h = 0; h < heads; ++h) {
    std::byte *first = row + 2 * h * half_bytes, *second = first + half_bytes;
    for (int i = 0; i < half; i += kLanes) {
      const auto cos = load_lanes<S, Dtype::kFloat>(angles, i, half);
      const auto sin = load_lanes<S, Dtype::kFloat>(angles + 4 * std::size_t(half), i, half);
      const auto low = load_lanes<S, dtype>(first, i, half), high = load_lanes<S, dtype>(second, i, half);
      store_lanes<S, dtype>(first, i, half, S::sub(S::mul(low, cos), S::mul(high, sin)));
      store_lanes<S, dtype>(second, i, half, S::add(S::mul(high, cos), S::mul(low, sin)));
    }
  }
}

// x += more, unless `more` is null; then x / sqrt(mean(x^2) + epsilon) * weight.
template <class S, Dtype dtype>
void norm_row(std::byte* x, const std::byte* more, const std::byte* weight, int n, float epsilon, std::byte* out) {
  for (int i = 0; more != nullptr && i < n; i += kLanes)
    store_lanes<S, dtype>(x, i, n, S::add(load_lanes<S, dtype>(x, i, n), load_lanes<S, dtype>(more, i, n)));
  auto squares = S::zero();
  for (int i = 0; i < n; i += kLanes) {
    const auto lanes = load_lanes<S, dtype>(x, i, n);
    squares = S::fma(lanes, lanes, squares);
  }
  const auto factor = S::splat(1.0f / __builtin_sqrtf(S::reduce_add(squares) / float(n) + epsilon));
  for (int i = 0; i < n; i += kLanes)
    store_lanes<S, dtype>(out, i, n,
                          S::mul(S::mul(load_lanes<S, dtype>(x, i, n), factor), load_lanes<S, dtype>(weight, i, n)));
}

// silu(gate) * up. Both powers of e have exponents of at most 0, so none overflows.
template <class S, Dtype dtype>
void gate_row(const std::byte* gate, const std::byte* up, int n, std::byte* out) {
  const auto log2e = S::splat(kLog2e), one = S::splat(1.0f);
  for (int i = 0; i < n; i += kLanes) {
    const auto x = load_lanes<S, dtype>(gate, i, n), steps = S::mul(x, log2e);
    const auto below = S::min(steps, S::zero()), distance = S::min(steps, S::sub(S::zero(), steps));
    const auto sigmoid = S::div(exp2<S>(below), S::add(exp2<S>(distance), one));
    store_lanes<S, dtype>(out, i, n, S::mul(S::mul(x, sigmoid), load_lanes<S, dtype>(up, i, n)));
  }
}

constexpr std::int32_t kInfinity = 0x7F800000;  // as `ordered` has it

// Integers in the order of floats, so that comparisons run 16 at a time; the zeros are equal, and NaN is the largest.
[[gnu::always_inline]] inline std::int32_t ordered(float value) {
  const auto bits = std::bit_cast<std::int32_t>(value), magnitude = bits & 0x7FFFFFFF;
  const std::int32_t signed_bits = bits < 0 ? -magnitude : magnitude;
  return magnitude > kInfinity ? magnitude : signed_bits;
}

// Index of the row's largest value, the first among equals; -1 if the row holds NaN or its largest value is infinite.
template <class S, Dtype dtype>
std::int64_t largest_in_row(const std::byte* row, int n) {
  alignas(64) float x[kLanes];
  alignas(64) std::int32_t top[kLanes], from[kLanes];  // each lane's largest value, and where its vector begins
  for (int l = 0; l < kLanes; ++l) {
    top[l] = -kInfinity;
    from[l] = 0;
  }
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    S::store(x, load_lanes<S, dtype>(row, i, n));
    for (int l = 0; l < kLanes; ++l) {
      const std::int32_t value = ordered(x[l]);
      from[l] = value > top[l] ? i : from[l];
      top[l] = value > top[l] ? value : top[l];
    }
  }
  S::store(x, load_lanes<S, dtype>(row, whole, n));
  std::int32_t most = -kInfinity;
  int at = 0;
  const auto consider = [&](std::int32_t value, int place) {
    if (value > most || (value == most && place < at)) at = place;
    most = value > most ? value : most;
  };
  for (int l = 0; whole > 0 && l < kLanes; ++l) consider(top[l], from[l] + l);
  for (int l = 0; l < n - whole; ++l) consider(ordered(x[l]), whole + l);
  return most >= kInfinity || most == -kInfinity ? -1 : at;
}

}  // namespace hack
