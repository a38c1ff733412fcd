// Scores to weights: what one page gives to a row, and how the row's running state takes it.
//
// Everything up to `PageWeights` depends on the row and the page alone, never on how work is split, and both ways of
// multiplying (packed.h, tile.h) share these lines: the integer weights agree to the bit.
#pragma once

#include "query.h"
#include "unrolled.h"

namespace hack {

// P of one page: code * scale + low, relative to 2^maximum; `sum` = Σ codes.
struct PageWeights {
  float scale;
  float low;
  float sum;
};

// One partition's share of an integer product, Eq. (4) of the paper without the terms of the row's own minimum:
// sum + row_scale * (scale * dots + minimum * Σ row codes). It serves Q·K^T and P·V.
template <class S>
typename S::F add_product(typename S::F sum, typename S::F dots, typename S::F scale, typename S::F minimum,
                          float row_scale, float row_codes) {
  return S::fma(S::splat(row_scale), S::fma(scale, dots, S::mul(minimum, S::splat(row_codes))), sum);
}

template <class S>
typename S::F lane_maxima(const float* scores, int n) {
  auto top = S::load(scores);
  for (int i = kLanes; i < n; i += kLanes) top = S::max(top, S::load(scores + i));
  return top;
}

// Maxima of four rows of scores [4, n], for their reductions share work.
template <class S>
void row_maxima(const float* scores, int n, float* tops) {
  typename S::F lanes[kTile];
  for (int r = 0; r < kTile; ++r) lanes[r] = lane_maxima<S>(scores + r * n, n);
  S::fold_max(lanes, tops);
}

// Symmetric form: p in 0..1 becomes a code in 0..127. Four rows of scores [4, n] and their maxima.
template <class S>
void weigh_symmetric(float* scores, int n, const float* tops, std::uint8_t* codes, PageWeights* weights) {
  typename S::F lanes[kTile];
  float sums[kTile];
  typename S::I codes_sum[kTile];
  for (auto& sum : codes_sum) sum = S::zero_int();
  for (int i = 0; i < n; i += kLanes) {
    unrolled<kTile>([&](auto r) __attribute__((always_inline)) {
      const auto p = exp2<S, 4, int(kSymmetricLevels)>(S::sub(S::load(scores + r * n + i), S::splat(tops[r])));
      const auto code = S::nearest(p);
      S::store_low_bytes(codes + r * n + i, code);
      codes_sum[r] = S::add_int(codes_sum[r], code);
    });
  }
  for (int r = 0; r < kTile; ++r) lanes[r] = S::to_float(codes_sum[r]);
  S::fold_add(lanes, sums);
  for (int r = 0; r < kTile; ++r) weights[r] = {1.0f / kSymmetricLevels, 0.0f, sums[r]};
}

// Asymmetric form: 256 levels between the page's smallest weight and 1. Scores [4, n] become weights in place.
template <class S>
void weigh_asymmetric(float* scores, int n, const float* tops, std::uint8_t* codes, PageWeights* weights) {
  for (int r = 0; r < kTile; ++r, scores += n, codes += n) {
    auto least = S::splat(1.0f);
    for (int i = 0; i < n; i += kLanes) {
      const auto p = exp2<S>(S::sub(S::load(scores + i), S::splat(tops[r])));
      least = S::min(p, least);
      S::store(scores + i, p);
    }
    const float low = S::reduce_min(least), range = (1.0f - low) / kAsymmetricLevels, scale = range == 0 ? 1.0f : range;
    auto sum = S::zero_int();
    for (int i = 0; i < n; i += kLanes) {
      const auto steps = S::div(S::sub(S::load(scores + i), S::splat(low)), S::splat(scale));
      const auto code = S::truncate(S::add(steps, S::splat(0.5f)));
      S::store_low_bytes(codes + i, code);
      sum = S::add_int(sum, code);
    }
    weights[r] = {scale, low, float(S::reduce_add_int(sum))};
  }
}

// Raises the state's maxima at `row`.. to `tops`, and its weights and outputs fall by as much.
template <class S>
void raise_tops(const Format& fmt, State& state, int row, int rows, const float* tops) {
  alignas(64) float keep[kLanes] = {};
  for (int r = 0; r < rows; ++r) {
    const float before = state.top[row + r];
    state.top[row + r] = tops[r] > before ? tops[r] : before;
    keep[r] = before - state.top[row + r];
  }
  S::store(keep, exp2<S>(S::load(keep)));
  for (int r = 0; r < rows; ++r) {
    if (keep[r] == 1.0f) continue;
    state.weight[row + r] *= keep[r];
    float* out = state.out + std::size_t(row + r) * fmt.head_dim;
    for (int d = 0; d < fmt.head_dim; d += kLanes) S::store(out + d, S::mul(S::splat(keep[r]), S::load(out + d)));
  }
}

// What the integer products of one row with a page's V are multiplied by.
struct RowMerge {
  float take;      // of s_v Σp'v' + m_v Σp'
  float take_low;  // of s_v Σv' + Π m_v; asymmetric form only
  float sum;       // Σp'
};

// The state of NR rows takes the maxima of `pages` pages: tops and takes are [pages, NR], at most kLanes; a take is
// what the weights of that page and row count for.
template <class S, int NR>
void take_maxima(const Format& fmt, State& state, int row, int pages, const float* tops, float* takes) {
  float most[NR];
  for (int r = 0; r < NR; ++r) most[r] = tops[r];
  for (int i = NR; i < pages * NR; ++i) most[i % NR] = most[i % NR] < tops[i] ? tops[i] : most[i % NR];
  raise_tops<S>(fmt, state, row, NR, most);
  alignas(64) float below[kLanes] = {};
  for (int i = 0; i < pages * NR; ++i) below[i] = tops[i] - state.top[row + i % NR];
  S::store(takes, exp2<S>(S::load(below)));
}

// The state's weights take those of one page.
template <class S, int NR>
void merge_weights(const Format& fmt, State& state, int row, const float* takes, const PageWeights* weights,
                   RowMerge* merges) {
  for (int r = 0; r < NR; ++r) {
    const float of_codes = takes[r] * weights[r].scale, of_low = takes[r] * weights[r].low;
    merges[r] = {of_codes, of_low, weights[r].sum};
    state.weight[row + r] += of_codes * weights[r].sum + float(fmt.page_tokens) * of_low;
  }
}

}  // namespace hack
