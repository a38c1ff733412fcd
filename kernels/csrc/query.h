// Q in 8 bits, the running state of the rows of one item, and what it leaves.
#pragma once

#include <cmath>
#include <cstring>

#include "arena.h"
#include "half.h"
#include "math.h"
#include "work.h"

namespace hack {

inline constexpr int kTile = 4;  // rows that share one pass over a page's codes

// Rows below which unpacking a page costs more than reading its packed codes again for every four rows.
inline constexpr int kPackedRows = 12;

constexpr int padded_rows(int rows) {
  return (rows + kTile - 1) / kTile * kTile;
}

// Rows of Q, padded with zeros to R, a multiple of kTile. Scores are kept in units of log2, so `scale`, `minimum` and
// `exact` carry a factor log2(e): exp(x) is then a power of two without a further product.
struct Query {
  int rows;
  int padded;          // R
  std::int8_t* codes;  // [R, D]; this and the next three only where pages hold codes
  float* scale;        // [G, R]
  float* sums;         // [G, R] Σ codes
  float* minimum;      // [G, R], asymmetric form only
  float* exact;        // [R, D]
};

// Below any score, yet finite: differences of it are numbers.
inline constexpr float kUnseen = -1e30f;

// Online softmax: out / weight is the result for the keys seen so far, both relative to 2^top.
struct State {
  float* top;     // [R]
  float* weight;  // [R]
  float* out;     // [R, D]
};

template <class S>
void load_row(const std::byte* row, Dtype dtype, int n, float* out) {
  if (dtype == Dtype::kFloat) {
    std::memcpy(out, row, 4 * std::size_t(n));
    return;
  }
  const auto* half = reinterpret_cast<const std::uint16_t*>(row);
  if (dtype == Dtype::kHalf) {
    for (int i = 0; i < n; i += kLanes) S::store(out + i, S::load_half(half + i));
  } else {
    for (int i = 0; i < n; ++i) out[i] = bfloat_to_float(half[i]);
  }
}

template <class S>
void store_row(std::byte* row, Dtype dtype, int n, const float* values) {
  if (dtype == Dtype::kFloat) {
    std::memcpy(row, values, 4 * std::size_t(n));
    return;
  }
  auto* half = reinterpret_cast<std::uint16_t*>(row);
  if (dtype == Dtype::kHalf) {
    for (int i = 0; i < n; i += kLanes) S::store_half(half + i, S::load(values + i));
  } else {
    for (int i = 0; i < n; ++i) half[i] = float_to_bfloat(values[i]);
  }
}

// One partition x [Z] of a scaled row; the definition is `quantize_query` in reference.py.
template <class S>
void quantize_partition(const Format& fmt, const float* x, std::int8_t* codes, float* scale, float* sum, float* low) {
  auto smallest = S::load(x), largest = smallest;
  for (int d = kLanes; d < fmt.k_partition; d += kLanes) {
    smallest = S::min(S::load(x + d), smallest);
    largest = S::max(S::load(x + d), largest);
  }
  const float lo = S::reduce_min(smallest), hi = S::reduce_max(largest);
  const float range = fmt.asymmetric ? (hi - lo) / kAsymmetricLevels : (hi > -lo ? hi : -lo) / kSymmetricLevels;
  const float step = range == 0.0f ? 1.0f : range;
  const float origin = fmt.asymmetric ? lo : 0.0f, offset = fmt.asymmetric ? 128.0f : 0.0f;
  const auto least = S::splat(fmt.asymmetric ? 0.0f : -127.0f), most = S::splat(fmt.asymmetric ? 255.0f : 127.0f);
  auto total = S::zero_int();
  for (int d = 0; d < fmt.k_partition; d += kLanes) {
    const auto steps = S::div(S::sub(S::load(x + d), S::splat(origin)), S::splat(step));
    const auto level = S::max(S::min(S::floor(S::add(steps, S::splat(0.5f))), most), least);
    const auto code = S::truncate(S::sub(level, S::splat(offset)));
    total = S::add_int(total, code);
    S::store_low_bytes(reinterpret_cast<std::uint8_t*>(codes + d), code);
  }
  *scale = step * kLog2e;
  *sum = float(S::reduce_add_int(total));
  if (fmt.asymmetric) *low = (lo + 128.0f * step) * kLog2e;
}

template <class S>
Query make_query(const Format& fmt, const AttendItem& item, Arena<S>& arena) {
  const int rows = item.tokens * item.group, padded = padded_rows(rows), d = fmt.head_dim, groups = fmt.k_groups();
  Query query{rows,
              padded,
              arena.template take<std::int8_t>(padded * d),
              arena.template take<float>(padded * groups),
              arena.template take<float>(padded * groups),
              arena.template take<float>(padded * groups),
              arena.template take<float>(padded * d)};
  const float root = std::sqrt(float(d));
  for (int r = 0; r < padded; ++r) {
    float* row = query.exact + r * d;
    if (r < rows) {
      const std::byte* token = item.q + (r / item.group) * item.q_stride;
      load_row<S>(token + std::int64_t(r % item.group) * d * bytes_of(item.dtype), item.dtype, d, row);
    } else {
      for (int i = 0; i < d; ++i) row[i] = 0.0f;
    }
    for (int i = 0; i < d; i += kLanes) S::store(row + i, S::div(S::load(row + i), S::splat(root)));
    for (int g = 0; fmt.coded() && g < groups; ++g) {
      const int z = g * fmt.k_partition, at = g * padded + r;
      quantize_partition<S>(fmt, row + z, query.codes + r * d + z, query.scale + at, query.sums + at,
                            query.minimum + at);
    }
    for (int i = 0; i < d; i += kLanes) S::store(row + i, S::mul(S::load(row + i), S::splat(kLog2e)));
  }
  return query;
}

template <class S>
State make_state(const Format& fmt, int rows, Arena<S>& arena) {
  const int padded = padded_rows(rows);
  State state{arena.template take<float>(padded + kLanes), arena.template take<float>(padded + kLanes),
              arena.template take<float>(std::size_t(padded) * fmt.head_dim)};
  for (int r = 0; r < padded; ++r) {
    state.top[r] = kUnseen;
    state.weight[r] = 0.0f;
  }
  std::memset(state.out, 0, sizeof(float) * std::size_t(padded) * fmt.head_dim);
  return state;
}

// Row r of the item's output = values / weight, in the dtype of the queries.
template <class S>
void write_row(const Format& fmt, const AttendItem& item, int r, float* values, float weight) {
  for (int d = 0; d < fmt.head_dim; d += kLanes) S::store(values + d, S::div(S::load(values + d), S::splat(weight)));
  std::byte* token = item.out + (r / item.group) * item.out_stride;
  store_row<S>(token + std::int64_t(r % item.group) * fmt.head_dim * bytes_of(item.dtype), item.dtype, fmt.head_dim,
               values);
}

template <class S>
void write_state(const Format& fmt, const AttendItem& item, int rows, State& state) {
  if (item.partial != nullptr) {
    std::memcpy(item.partial, state.top, sizeof(float) * rows);
    std::memcpy(item.partial + rows, state.weight, sizeof(float) * rows);
    std::memcpy(item.partial + 2 * rows, state.out, sizeof(float) * rows * fmt.head_dim);
    return;
  }
  for (int r = 0; r < rows; ++r) write_row<S>(fmt, item, r, state.out + std::size_t(r) * fmt.head_dim, state.weight[r]);
}

}  // namespace hack
