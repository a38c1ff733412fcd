// Q in 8 bits and P in 8 bits, for pages of levels. Decode and prefill share this Q.
#pragma once

#include "level_format.h"
#include "query.h"
#include "softmax.h"

namespace hack {

// `scale` carries the factor log2(e) of `exact`.
struct LevelQuery : Query {
  std::int8_t* codes;  // [R, D]
  float* scale;        // [R]
  float* sums;         // [R] Σ codes
};

template <class S>
LevelQuery make_level_query(const LevelFormat& fmt, const AttendItem& item, Arena<S>& arena) {
  const int padded = padded_rows(item.tokens * item.group), d = fmt.head_dim;
  auto* codes = arena.template take<std::int8_t>(std::size_t(padded) * d);
  float* scale = arena.template take<float>(padded);
  float* sums = arena.template take<float>(padded);
  const Query query = make_query<S>(fmt, item, arena, [&](int r, const float* row) {
    auto smallest = S::load(row), largest = smallest;
    for (int i = kLanes; i < d; i += kLanes) {
      smallest = S::min(S::load(row + i), smallest);
      largest = S::max(S::load(row + i), largest);
    }
    const float low = -S::reduce_min(smallest), high = S::reduce_max(largest);
    const float range = (high > low ? high : low) / kSymmetricLevels, step = range == 0.0f ? 1.0f : range;
    const auto most = S::splat(kSymmetricLevels), least = S::splat(-kSymmetricLevels);
    auto total = S::zero_int();
    for (int i = 0; i < d; i += kLanes) {
      const auto steps = S::add(S::div(S::load(row + i), S::splat(step)), S::splat(0.5f));
      const auto code = S::truncate(S::max(S::min(S::floor(steps), most), least));
      total = S::add_int(total, code);
      S::store_low_bytes(reinterpret_cast<std::uint8_t*>(codes + std::size_t(r) * d + i), code);
    }
    scale[r] = step * kLog2e;
    sums[r] = float(S::reduce_add_int(total));
  });
  return {query, codes, scale, sums};
}

// P of one page for one row: Σ p, and the codes' scale and sum. code · scale = p · (the token's scale of V).
struct LevelWeights {
  float weight;
  float scale;
  float sum;
};

// Turns four rows of products with K, `scores` [4, n], into codes [4, n] in 0..127. A score is a product times its
// row's `scale`; `tops` are the rows' largest scores. `v_scale` is [n].
template <class S>
void weigh_levels(float* scores, int n, const float* scale, const float* tops, const float* v_scale, std::uint8_t* codes,
                  LevelWeights* weights) {
  typename S::F sums[kTile], most[kTile];
  for (int r = 0; r < kTile; ++r) sums[r] = most[r] = S::zero();
  for (int i = 0; i < n; i += kLanes) {
    const auto of_token = S::load(v_scale + i);
    unrolled<kTile>([&](auto r) __attribute__((always_inline)) {
      const auto p = exp2<S>(S::fma(S::load(scores + r * n + i), S::splat(scale[r]), S::splat(-tops[r])));
      const auto w = S::mul(p, of_token);
      sums[r] = S::add(sums[r], p);
      most[r] = S::max(most[r], w);
      S::store(scores + r * n + i, w);
    });
  }
  float weight[kTile], largest[kTile], total[kTile];
  S::fold_add(sums, weight);
  S::fold_max(most, largest);
  typename S::I codes_sum[kTile];
  for (auto& sum : codes_sum) sum = S::zero_int();
  for (int i = 0; i < n; i += kLanes) {
    unrolled<kTile>([&](auto r) __attribute__((always_inline)) {
      const auto code = S::nearest(S::mul(S::load(scores + r * n + i), S::splat(kSymmetricLevels / largest[r])));
      S::store_low_bytes(codes + r * n + i, code);
      codes_sum[r] = S::add_int(codes_sum[r], code);
    });
  }
  for (int r = 0; r < kTile; ++r) sums[r] = S::to_float(codes_sum[r]);
  S::fold_add(sums, total);
  for (int r = 0; r < kTile; ++r) weights[r] = {weight[r], largest[r] / kSymmetricLevels, total[r]};
}

// Factors of the integer products of one row with a page's V: out += take · (Σ w'c - correction).
struct LevelMerge {
  float take;
  float correction;  // z Σ w'
};

// Adds the weights of one page to the state's weights. `takes` come from `take_maxima`.
template <class S, int NR>
void merge_levels(State& state, int row, float zero, const float* takes, const LevelWeights* weights,
                  LevelMerge* merges) {
  for (int r = 0; r < NR; ++r) {
    merges[r] = {takes[r] * weights[r].scale, zero * weights[r].sum};
    state.weight[row + r] += takes[r] * weights[r].weight;
  }
}

}  // namespace hack
