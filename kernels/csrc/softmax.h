// Scores to weights: one page's contribution to a row, and its merge into the row's running state.
//
// Everything up to `PageWeights` depends on the row and the page alone, never on how work is split. Both ways of
// multiplying (packed.h, tile.h) share this code, so their integer weights agree to the bit.
#pragma once

#include "hack_query.h"
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

// Maxima of four rows of scores [4, n]: four reductions share work.
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

// Factors of the integer products of one row with a page's V.
struct RowMerge {
  float take;      // of s_v Σp'v' + m_v Σp'
  float take_low;  // of s_v Σv' + Π m_v; asymmetric form only
  float sum;       // Σp'
};

// Merges the maxima of `pages` pages into the state of NR rows. `tops` and `takes` are [pages, NR], at most kLanes
// values; a take is the factor of that page's weights for that row.
template <class S, int NR>
void take_maxima(const PageFormat& fmt, State& state, int row, int pages, const float* tops, float* takes) {
  float most[NR];
  for (int r = 0; r < NR; ++r) most[r] = tops[r];
  for (int i = NR; i < pages * NR; ++i) most[i % NR] = most[i % NR] < tops[i] ? tops[i] : most[i % NR];
  raise_tops<S>(fmt, state, row, NR, most);
  alignas(64) float below[kLanes] = {};
  for (int i = 0; i < pages * NR; ++i) below[i] = tops[i] - state.top[row + i % NR];
  S::store(takes, exp2<S>(S::load(below)));
}

// Adds the weights of one page to the state's weights.
template <class S, int NR>
void merge_weights(const HackFormat& fmt, State& state, int row, const float* takes, const PageWeights* weights,
                   RowMerge* merges) {
  for (int r = 0; r < NR; ++r) {
    const float of_codes = takes[r] * weights[r].scale, of_low = takes[r] * weights[r].low;
    merges[r] = {of_codes, of_low, weights[r].sum};
    state.weight[row + r] += of_codes * weights[r].sum + float(fmt.page_tokens) * of_low;
  }
}

}  // namespace hack
