// Matrix products with the rows of a weight as they rest: out[r][n] = Σ_k x[r][k] w[n][k] + bias[n], summed in FP32.
//
// Every sum is formed in one order: lanes over k (`Products`), then a fold of the lanes. So a row of the result depends
// neither on the rows beside it nor on the number of threads. No weight is copied: processes may share a mapped file.
#pragma once

#include "rowwise.h"
#include "unrolled.h"

namespace hack {

template <int n>
using Constant = std::integral_constant<int, n>;

template <class S, Dtype dtype>
float value_at(const std::byte* row, std::int64_t at) {
  if constexpr (dtype == Dtype::kFloat) return reinterpret_cast<const float*>(row)[at];
  const std::uint16_t value = reinterpret_cast<const std::uint16_t*>(row)[at];
  return dtype == Dtype::kHalf ? half_to_float(value) : bfloat_to_float(value);
}

template <class S, Dtype dtype>
void set_value(std::byte* row, std::int64_t at, float value) {
  if constexpr (dtype == Dtype::kFloat)
    reinterpret_cast<float*>(row)[at] = value;
  else
    reinterpret_cast<std::uint16_t*>(row)[at] = dtype == Dtype::kHalf ? float_to_half(value) : float_to_bfloat(value);
}

// `count` rows of n values -> FP32 rows of padded_floats(n), zeros past n.
template <class S, Dtype dtype>
void widen_rows(const std::byte* rows, std::int64_t stride, int count, int n, float* out) {
  for (int r = 0; r < count; ++r) widen_row<S, dtype>(rows + r * stride, n, false, out + r * padded_floats(n));
}

// Rows in FP32, or of a weight's dtype; they are readable up to whole vectors if they are FP32.
struct ProductRows {
  const std::byte* data;
  std::int64_t stride;  // in bytes

  const std::byte* row(std::int64_t at) const { return data + at * stride; }
};

// R rows of x, from row `row` on, times N rows of w, to outputs [first, first + N).
template <class S, Dtype stored, Dtype dtype, int R, int N>
void product_tile(const ProductItem& item, const ProductRows& x, const ProductRows& w, std::int64_t row,
                  std::int64_t first) {
  using P = typename S::Products;
  constexpr int kSums = (R * N + 3) / 4 * 4;
  typename P::F sums[kSums];
  unrolled<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = P::zero(); });
  const auto step = [&](int i, int end) __attribute__((always_inline)) {
    typename P::F weights[N];
    unrolled<N>([&](auto n) __attribute__((always_inline)) {
      weights[n] = load_lanes<P, stored, P::kProductLanes>(w.row(n), i, end);
    });
    unrolled<R>([&](auto r) __attribute__((always_inline)) {
      const auto lanes = P::load(reinterpret_cast<const float*>(x.row(row + r)) + i);
      unrolled<N>([&](auto n) __attribute__((always_inline)) {
        sums[r * N + n] = P::fma(lanes, weights[n], sums[r * N + n]);
      });
    });
  };
  int i = 0;
  constexpr int kWhole = P::kProductLanes;
  for (; i + kWhole <= item.k; i += kWhole) step(i, i + kWhole);  // nothing to compare
  if (i < item.k) step(i, item.k);
  float folded[kSums];
  unrolled<kSums / 4>([&](auto q) __attribute__((always_inline)) {
    const typename P::F four[4] = {sums[4 * q], sums[4 * q + 1], sums[4 * q + 2], sums[4 * q + 3]};
    P::fold_add(four, folded + 4 * q);
  });
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      const float bias = item.bias == nullptr ? 0.0f : value_at<S, dtype>(item.bias, first + n);
      set_value<S, dtype>(item.out + (row + r) * item.out_stride, first + n, folded[r * N + n] + bias);
    }
  }
}

// Rows [begin, end) of x.
struct RowRange {
  std::int64_t begin;
  std::int64_t end;
};

// Some rows of x, R at a time, times N rows of w.
template <class S, Dtype stored, Dtype dtype, int R, int N>
void product_outputs(const ProductItem& item, const ProductRows& x, RowRange rows, const ProductRows& w,
                     std::int64_t first) {
  std::int64_t row = rows.begin;
  if constexpr (R > 1) {
    for (; row + R <= rows.end; row += R) product_tile<S, stored, dtype, R, N>(item, x, w, row, first);
  }
  for (; row < rows.end; ++row) product_tile<S, stored, dtype, 1, N>(item, x, w, row, first);
}

// Some rows of x times N rows of w from `first` on. Rows of w are widened to `wide` unless `wide` is null.
template <class S, Dtype stored, Dtype dtype, int R, int N>
void product_group(const ProductItem& item, const ProductRows& x, RowRange rows, std::int64_t first, float* wide) {
  const std::int64_t stride = std::int64_t(item.k) * bytes_of(stored);
  const ProductRows w{item.w + first * stride, stride};
  if (wide == nullptr) return product_outputs<S, stored, dtype, R, N>(item, x, rows, w, first);
  widen_rows<S, stored>(w.data, stride, N, item.k, wide);
  const std::int64_t wide_stride = std::int64_t(padded_floats(item.k) * sizeof(float));
  const ProductRows widened{reinterpret_cast<const std::byte*>(wide), wide_stride};
  product_outputs<S, Dtype::kFloat, dtype, R, N>(item, x, rows, widened, first);
}

// Some rows of x times the item's rows of w, which are of the dtype `stored`.
template <class S, Dtype stored, Dtype dtype>
void product_rows(const ProductItem& item, const ProductRows& x, RowRange rows, float* wide) {
  const auto columns = [&](auto R, auto N) __attribute__((always_inline)) {
    std::int64_t first = item.first;
    for (; first + N <= item.last; first += N) product_group<S, stored, dtype, R, N>(item, x, rows, first, wide);
    for (; first < item.last; ++first) product_group<S, stored, dtype, R, 1>(item, x, rows, first, wide);
  };
  if (rows.end - rows.begin == 1) return columns(Constant<1>{}, Constant<S::kProductOutputsOfOneRow>{});
  columns(Constant<S::kProductRows>{}, Constant<S::kProductOutputs>{});
}

// The number of rows of x, in whole tiles, that stay in the first-level cache while rows of w pass by.
template <class S>
std::int64_t cached_rows(int k) {
  constexpr std::int64_t R = S::kProductRows;
  const std::int64_t rows = S::kProductCache / std::int64_t(padded_floats(k) * sizeof(float));
  return rows < 2 * R ? 2 * R : rows / R * R;
}

// A block of rows of x times a range of rows of w.
template <class S, Dtype dtype>
void product_block(const ProductItem& item, std::byte* scratch) {
  const std::size_t padded = padded_floats(item.k);
  const bool ready = dtype == Dtype::kFloat && item.k % kLanes == 0;
  auto* wide = reinterpret_cast<float*>(scratch);
  ProductRows x{scratch, std::int64_t(padded * sizeof(float))};
  if (ready)
    x = {item.x, item.x_stride};
  else
    widen_rows<S, dtype>(item.x, item.x_stride, item.rows, item.k, wide);
  const bool few = ready || item.rows <= 2 * S::kProductRows;
  float* group = few ? nullptr : wide + kProductBlock * padded;
  const std::int64_t step = few ? cached_rows<S>(item.k) : item.rows;
  for (std::int64_t begin = 0; begin < item.rows; begin += step) {
    const RowRange rows{begin, begin + step < item.rows ? begin + step : item.rows};
    product_rows<S, dtype, dtype>(item, x, rows, group);
  }
}

}  // namespace hack
