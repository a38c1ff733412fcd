// Rows of a head times a matrix: out[r][n] = Σ_k x[r][k] m[k][n] + shift[n], in FP32.
//
// Outputs lie in lanes, and every sum goes over k in order. So a row of the result does not depend on the rows beside it.
#pragma once

#include "rowwise.h"
#include "unrolled.h"

namespace hack {

// R rows, from row `row` on, times N vectors of columns of the matrix, from column `first` on. `whole`: no vector ends
// past the last column, so that no function is called, which would keep the sums in memory.
template <class S, Dtype dtype, int R, int N, bool whole>
void turn_tile(const TurnItem& item, int row, int first) {
  const int d = item.head_dim;
  const auto* x = reinterpret_cast<const std::byte*>(item.x) + row * item.x_stride;
  const auto* m = reinterpret_cast<const std::byte*>(item.matrix);
  typename S::F sums[R][N];
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) { sums[i / N][i % N] = S::zero(); });
  for (int k = 0; k < d; ++k, m += d * sizeof(float)) {
    typename S::F columns[N];
    unrolled<N>([&](auto n) __attribute__((always_inline)) {
      const int at = first + n * kLanes;
      columns[n] = load_lanes<S, Dtype::kFloat>(m, at, whole ? at + kLanes : d);
    });
    unrolled<R>([&](auto r) __attribute__((always_inline)) {
      const auto value = S::splat(reinterpret_cast<const float*>(x + r * item.x_stride)[k]);
      unrolled<N>([&](auto n) __attribute__((always_inline)) { sums[r][n] = S::fma(value, columns[n], sums[r][n]); });
    });
  }
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
    const int at = first + i % N * kLanes, end = whole ? at + kLanes : d;
    auto sum = sums[i / N][i % N];
    if (item.shift != nullptr)
      sum = S::add(sum, load_lanes<S, Dtype::kFloat>(reinterpret_cast<const std::byte*>(item.shift), at, end));
    store_lanes<S, dtype>(item.out + (row + i / N) * item.out_stride, at, end, sum);
  });
}

// R rows times the columns from `first` on, N vectors of them at a time, the rest half as many at a time.
template <class S, Dtype dtype, int R, int N>
void turn_rows(const TurnItem& item, int row, int first = 0) {
  const int d = item.head_dim;
  for (; first + N * kLanes <= d; first += N * kLanes) turn_tile<S, dtype, R, N, true>(item, row, first);
  if constexpr (N > 1) turn_rows<S, dtype, R, N / 2>(item, row, first);
  else if (first < d) turn_tile<S, dtype, R, 1, false>(item, row, first);
}

template <class S, Dtype dtype>
void turn_head(const TurnItem& item) {
  int row = 0;
  for (; row + S::kTurnRows <= item.rows; row += S::kTurnRows) turn_rows<S, dtype, S::kTurnRows, S::kTurnVectors>(item, row);
  for (; row < item.rows; ++row) turn_rows<S, dtype, 1, S::kTurnVectorsOfOneRow>(item, row);
}

}  // namespace hack
