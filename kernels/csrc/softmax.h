// Scores to weights: what one page gives to a row, and how the row's running state takes it.
//
// Everything up to `PageWeights` depends on the row and the page alone, never on how work is split, and both ways of
// multiplying (packed.h, tile.h) share these lines: the integer weights agree to the bit.
#pragma once

#include "query.h"

namespace hack {

// P of one page: code * scale + low, relative to 2^top; `sum` = Σ codes.
struct PageWeights {
  float top;
  float scale;
  float low;
  float sum;
};

// One partition's share of 16 scores: Eq. (4) of the paper without the terms of Q's minimum.
template <class S>
typename S::F add_score(typename S::F score, typename S::F dots, typename S::F k_scale, typename S::F k_min,
                        typename S::F q_scale, typename S::F q_sum) {
  return S::fma(q_scale, S::fma(k_scale, dots, S::mul(k_min, q_sum)), score);
}

template <class S>
float largest(const float* scores, int n) {
  auto top = S::load(scores);
  for (int i = kLanes; i < n; i += kLanes) top = S::max(top, S::load(scores + i));
  return S::reduce_max(top);
}

// Symmetric form: p in 0..1 becomes a code in 0..127.
template <class S>
PageWeights weigh_symmetric(const float* scores, int n, std::uint8_t* codes) {
  const float top = largest<S>(scores, n);
  auto sum = S::zero_int();
  for (int i = 0; i < n; i += kLanes) {
    const auto p = exp2<S>(S::sub(S::load(scores + i), S::splat(top)));
    const auto code = S::truncate(S::fma(p, S::splat(kSymmetricLevels), S::splat(0.5f)));
    S::store_low_bytes(codes + i, code);
    sum = S::add_int(sum, code);
  }
  return {top, 1.0f / kSymmetricLevels, 0.0f, float(S::reduce_add_int(sum))};
}

// Asymmetric form: 256 levels between the page's smallest weight and 1.
template <class S>
PageWeights weigh_asymmetric(float* scores, int n, std::uint8_t* codes) {
  const float top = largest<S>(scores, n);
  auto least = S::splat(1.0f);
  for (int i = 0; i < n; i += kLanes) {
    const auto p = exp2<S>(S::sub(S::load(scores + i), S::splat(top)));
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
  return {top, scale, low, float(S::reduce_add_int(sum))};
}

// Factors of one merge: old output times `keep`, new values times `take`.
struct Factors {
  float keep[kLanes];
  float take[kLanes];
};

// Take maxima `tops` of up to 16 rows into the state's, both at `row`.
template <class S>
Factors raise_tops(State& state, int row, int rows, const float* tops) {
  Factors factors;
  alignas(64) float before[kLanes], after[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    before[i] = i < rows ? state.top[row + i] : 0.0f;
    after[i] = i < rows ? (tops[i] > before[i] ? tops[i] : before[i]) : 0.0f;
    if (i < rows) state.top[row + i] = after[i];
  }
  alignas(64) float now[kLanes];
  for (int i = 0; i < kLanes; ++i) now[i] = i < rows ? tops[i] : 0.0f;
  const auto top = S::load(after);
  S::store(factors.keep, exp2<S>(S::sub(S::load(before), top)));
  S::store(factors.take, exp2<S>(S::sub(S::load(now), top)));
  return factors;
}

// What the integer products of one row with a page are multiplied by.
struct RowMerge {
  float keep;
  float take;      // of s_v Σp'v' + m_v Σp'
  float take_low;  // of s_v Σv' + Π m_v; asymmetric form only
  float sum;
};

template <class S>
void merge_weights(const Format& fmt, State& state, int row, int rows, const PageWeights* weights, RowMerge* merges) {
  float tops[kTile];
  for (int i = 0; i < rows; ++i) tops[i] = weights[i].top;
  const Factors factors = raise_tops<S>(state, row, rows, tops);
  for (int i = 0; i < rows; ++i) {
    const PageWeights& w = weights[i];
    const float keep = factors.keep[i], take = factors.take[i];
    merges[i] = {keep, take * w.scale, take * w.low, w.sum};
    const float total = w.scale * w.sum + float(fmt.page_tokens) * w.low;
    state.weight[row + i] = state.weight[row + i] * keep + take * total;
  }
}

// 16 channels of a row's output take a page's integer products.
template <class S>
void add_values(float* out, typename S::F dots, typename S::F v_scale, typename S::F v_min, const RowMerge& merge) {
  const auto values = S::fma(v_scale, dots, S::mul(v_min, S::splat(merge.sum)));
  S::store(out, S::fma(S::splat(merge.take), values, S::mul(S::splat(merge.keep), S::load(out))));
}

}  // namespace hack
