// Matrix products in BF16 with vdpbf16ps, with rows of x and of the weight as they rest.
//
// The instruction adds the products of two neighbouring columns to each of 16 sums in FP32. Every sum is formed in one
// order: steps of 32 columns, then a fold of the lanes. So a row does not depend on the rows beside it. As in the
// library, numbers below the normal range count as 0.
#pragma once

#include "bf16_columns.h"
#include "product.h"
#include "simd/avx512.h"

namespace hack {

inline constexpr int kDotRows = 4;     // sums of a tile: rows of x
inline constexpr int kDotOutputs = 6;  // times rows of a weight
inline constexpr int kDotOutputsOfOneRow = 8;

// R rows of x, from row `row` on, times N rows of w, to outputs [first, first + N).
template <class S, int R, int N>
void dot_tile(const ProductItem& item, std::int64_t row, std::int64_t first) {
  constexpr int kSums = (R * N + 3) / 4 * 4;
  const std::int64_t stride = 2 * std::int64_t(item.k);
  const std::byte *x = item.x + row * item.x_stride, *w = item.w + first * stride;
  __m512 sums[kSums];
  unrolled<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = _mm512_setzero_ps(); });
  const auto step = [&](int at, int end) __attribute__((always_inline)) {
    __m512bh weights[N];
    unrolled<N>([&](auto n) __attribute__((always_inline)) {
      weights[n] = __m512bh(load_columns(w + n * stride, at, end));
    });
    unrolled<R>([&](auto r) __attribute__((always_inline)) {
      const auto columns = __m512bh(load_columns(x + r * item.x_stride, at, end));
      unrolled<N>([&](auto n) __attribute__((always_inline)) {
        sums[r * N + n] = _mm512_dpbf16_ps(sums[r * N + n], columns, weights[n]);
      });
    });
  };
  int at = 0;
  for (; at + kBfloatColumns <= item.k; at += kBfloatColumns) step(at, at + kBfloatColumns);  // nothing to compare
  if (at < item.k) step(at, item.k);
  float folded[kSums];
  unrolled<kSums / 4>([&](auto q) __attribute__((always_inline)) {
    const __m512 four[4] = {sums[4 * q], sums[4 * q + 1], sums[4 * q + 2], sums[4 * q + 3]};
    S::fold_add(four, folded + 4 * q);
  });
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      const float bias = item.bias == nullptr ? 0.0f : value_at<S, Dtype::kBfloat>(item.bias, first + n);
      set_value<S, Dtype::kBfloat>(item.out + (row + r) * item.out_stride, first + n, folded[r * N + n] + bias);
    }
  }
}

// All rows of x times N rows of w.
template <class S, int N>
void dot_rows(const ProductItem& item, std::int64_t first) {
  std::int64_t row = 0;
  for (; row + kDotRows <= item.rows; row += kDotRows) dot_tile<S, kDotRows, N>(item, row, first);
  for (; row < item.rows; ++row) dot_tile<S, 1, N>(item, row, first);
}

// A block of rows of x times a range of rows of w.
template <class S>
void dot_product_block(const ProductItem& item, std::byte*) {
  std::int64_t first = item.first;
  const auto outputs = [&](auto N) __attribute__((always_inline)) {
    for (; first + N <= item.last; first += N) dot_rows<S, N>(item, first);
  };
  if (item.rows == 1) outputs(Constant<kDotOutputsOfOneRow>{});
  outputs(Constant<kDotOutputs>{});
  outputs(Constant<1>{});
}

}  // namespace hack
