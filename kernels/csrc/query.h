// The rows of Q of one item, their running softmax state, and their output; pages of every kind share them.
#pragma once

#include <cmath>
#include <cstring>

#include "arena.h"
#include "half.h"
#include "math.h"
#include "work.h"

namespace hack {

inline constexpr int kTile = 4;  // rows that share one pass over a page's codes

constexpr int padded_rows(int rows) {
  return (rows + kTile - 1) / kTile * kTile;
}

// Rows of Q, padded with zeros to R, a multiple of kTile. Scores are kept in units of log2, so `exact` carries a factor
// log2(e): exp(x) is then a power of two without a further product.
struct Query {
  int rows;
  int padded;    // R
  float* exact;  // [R, D]
};

// Below any score, yet finite, so that the difference of two unseen scores is a number.
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
  for (int i = 0; i < n; i += kLanes)
    S::store(out + i, dtype == Dtype::kHalf ? S::load_half(half + i) : S::load_bfloat(half + i));
}

template <class S>
void store_row(std::byte* row, Dtype dtype, int n, const float* values) {
  if (dtype == Dtype::kFloat) {
    std::memcpy(row, values, 4 * std::size_t(n));
    return;
  }
  auto* half = reinterpret_cast<std::uint16_t*>(row);
  for (int i = 0; i < n; i += kLanes)
    dtype == Dtype::kHalf ? S::store_half(half + i, S::load(values + i)) : S::store_bfloat(half + i, S::load(values + i));
}

// take(r, row) is called with each scaled row, padding included, before the row is multiplied by log2(e).
template <class S, class Take>
Query make_query(const PageFormat& fmt, const AttendItem& item, Arena<S>& arena, Take take) {
  const int rows = item.tokens * item.group, padded = padded_rows(rows), d = fmt.head_dim;
  const Query query{rows, padded, arena.template take<float>(padded * d)};
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
    take(r, row);
    for (int i = 0; i < d; i += kLanes) S::store(row + i, S::mul(S::load(row + i), S::splat(kLog2e)));
  }
  return query;
}

template <class S>
Query make_query(const PageFormat& fmt, const AttendItem& item, Arena<S>& arena) {
  return make_query<S>(fmt, item, arena, [](int, const float*) {});
}

template <class S>
State make_state(const PageFormat& fmt, int rows, Arena<S>& arena) {
  const int padded = padded_rows(rows);
  State state{arena.template take<float>(padded + kLanes), arena.template take<float>(padded + kLanes),
              arena.template take<float>(std::size_t(padded) * fmt.head_dim)};
  for (int r = 0; r < padded + kLanes; ++r) {
    state.top[r] = kUnseen;
    state.weight[r] = 0.0f;
  }
  std::memset(state.out, 0, sizeof(float) * std::size_t(padded) * fmt.head_dim);
  return state;
}

template <class S>
typename S::F lane_maxima(const float* scores, int n) {
  auto top = S::load(scores);
  for (int i = kLanes; i < n; i += kLanes) top = S::max(top, S::load(scores + i));
  return top;
}

// Scales weights and outputs of the state's rows from `row` on by `keep`.
template <class S>
void scale_down(const PageFormat& fmt, State& state, int row, int rows, const float* keep) {
  for (int r = 0; r < rows; ++r) {
    if (keep[r] == 1.0f) continue;
    state.weight[row + r] *= keep[r];
    float* out = state.out + std::size_t(row + r) * fmt.head_dim;
    for (int d = 0; d < fmt.head_dim; d += kLanes) S::store(out + d, S::mul(S::splat(keep[r]), S::load(out + d)));
  }
}

// Raises the state's maxima at `row`.. to `tops` and scales its weights and outputs down accordingly.
template <class S>
void raise_tops(const PageFormat& fmt, State& state, int row, int rows, const float* tops) {
  alignas(64) float keep[kLanes] = {};
  for (int r = 0; r < rows; ++r) {
    const float before = state.top[row + r];
    state.top[row + r] = tops[r] > before ? tops[r] : before;
    keep[r] = before - state.top[row + r];
  }
  S::store(keep, exp2<S>(S::load(keep)));
  scale_down<S>(fmt, state, row, rows, keep);
}

// Row r of the item's output = values / weight, in the dtype of the queries.
template <class S>
void write_row(const PageFormat& fmt, const AttendItem& item, int r, float* values, float weight) {
  for (int d = 0; d < fmt.head_dim; d += kLanes) S::store(values + d, S::div(S::load(values + d), S::splat(weight)));
  std::byte* token = item.out + (r / item.group) * item.out_stride;
  store_row<S>(token + std::int64_t(r % item.group) * fmt.head_dim * bytes_of(item.dtype), item.dtype, fmt.head_dim,
               values);
}

template <class S>
void write_state(const PageFormat& fmt, const AttendItem& item, int rows, State& state) {
  if (item.partial != nullptr) {
    std::memcpy(item.partial, state.top, sizeof(float) * rows);
    std::memcpy(item.partial + rows, state.weight, sizeof(float) * rows);
    std::memcpy(item.partial + 2 * rows, state.out, sizeof(float) * rows * fmt.head_dim);
    return;
  }
  for (int r = 0; r < rows; ++r) write_row<S>(fmt, item, r, state.out + std::size_t(r) * fmt.head_dim, state.weight[r]);
}

// Merges the splits of one item into its output.
template <class S>
void merge(const PageFormat& fmt, const MergeItem& item) {
  const int rows = item.whole.tokens * item.whole.group;
  const std::int64_t size = partial_floats(fmt, rows);
  for (int r = 0; r < rows; ++r) {
    alignas(64) float out[kMaxHeadDim] = {};
    float top = item.partials[r], weight = 0.0f;
    for (int s = 1; s < item.splits; ++s) top = item.partials[s * size + r] > top ? item.partials[s * size + r] : top;
    for (int s = 0; s < item.splits; ++s) {
      const float* partial = item.partials + s * size;
      alignas(64) float factor[kLanes];
      S::store(factor, exp2<S>(S::splat(partial[r] - top)));
      weight += factor[0] * partial[rows + r];
      const float* values = partial + 2 * rows + std::int64_t(r) * fmt.head_dim;
      for (int d = 0; d < fmt.head_dim; d += kLanes)
        S::store(out + d, S::fma(S::splat(factor[0]), S::load(values + d), S::load(out + d)));
    }
    write_row<S>(fmt, item.whole, r, out, weight);
  }
}

}  // namespace hack
