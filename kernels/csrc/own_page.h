// A query's own page, as the open-page rule has it: exact FP32 arithmetic on FP16 rows, or K as codes made at once.
#pragma once

#include "quantize.h"
#include "tile.h"

namespace hack {

struct RowPointers {
  const std::uint16_t* k[kMaxPageTokens];
  const std::uint16_t* v[kMaxPageTokens];
};

template <class S>
RowPointers own_rows(const Format& fmt, const OwnRows& own) {
  RowPointers rows;
  for (int j = 0; j < own.total; ++j) {
    const bool old = j < own.open;
    const std::int64_t at = old ? std::int64_t(j) * fmt.head_dim : (j - own.open) * own.stride;
    rows.k[j] = (old ? own.open_k : own.k) + at;
    rows.v[j] = (old ? own.open_v : own.v) + at;
  }
  return rows;
}

// Scores of kTile exact rows with one key.
template <class S>
void exact_scores(const float* q, const std::uint16_t* key, int d, float* scores, int stride) {
  typename S::F dots[kTile];
  for (auto& lanes : dots) lanes = S::zero();
  for (int i = 0; i < d; i += kLanes) {
    const auto k = S::load_half(key + i);
    for (int r = 0; r < kTile; ++r) dots[r] = S::fma(S::load(q + r * d + i), k, dots[r]);
  }
  float sums[kTile];
  S::fold_add(dots, sums);
  for (int r = 0; r < kTile; ++r) scores[r * stride] = sums[r];
}

// Codes of the own page's K in the order of a wide page; rows past the last stay 0.
template <class S>
void widen_own_k(const Format& fmt, const OwnRows& own, const RowPointers& rows, const WidePage& wide, Arena<S> arena) {
  const int d = fmt.head_dim, groups = fmt.k_groups(), pi = fmt.page_tokens, blocks = pi / kLanes;
  const RowCodes codes = take_codes(fmt, fmt.k_meta(), arena);
  quantize_k<S>(fmt, own.place, rows.k, own.total, codes);
  std::memset(wide.k, 0, fmt.elements());
  std::memset(wide.k_min, 0, sizeof(float) * fmt.k_meta());
  std::memset(wide.k_scale, 0, sizeof(float) * fmt.k_meta());
  for (int t = 0; t < own.total; ++t) {
    for (int j = 0; j < d / kQuad; ++j) {
      std::uint8_t* to = wide.k + (std::size_t(j) * blocks + t / kLanes) * kVectorBytes + t % kLanes * kQuad;
      std::memcpy(to, codes.codes + t * d + kQuad * j, kQuad);
    }
    for (int g = 0; g < groups; ++g) {
      wide.k_min[g * pi + t] = codes.minimum[t * groups + g];
      wide.k_scale[g * pi + t] = codes.scale[t * groups + g];
    }
  }
  if (fmt.asymmetric) widen_k_sums<S>(fmt, wide);
}

// Weights of one row, in place of its scores; the state takes them. Keys past `visible` weigh 0.
template <class S>
void own_weights(const Format& fmt, State& state, int row, int visible, int padded, float* scores) {
  for (int j = visible; j < padded; ++j) scores[j] = kUnseen;
  const float top = S::reduce_max(lane_maxima<S>(scores, padded));
  raise_tops<S>(fmt, state, row, 1, &top);
  auto sum = S::zero();
  for (int j = 0; j < padded; j += kLanes) {
    const auto p = exp2<S>(S::sub(S::load(scores + j), S::splat(state.top[row])));
    S::store(scores + j, p);
    sum = S::add(sum, p);
  }
  state.weight[row] += S::reduce_add(sum);
}

// out += P·V for kTile rows; p is [kTile, Π].
template <class S>
void own_values(const Format& fmt, const RowPointers& rows, int total, const float* p, float* out) {
  constexpr int NB = 2;
  for (int d = 0; d < fmt.head_dim; d += NB * kLanes) {
    typename S::F sums[kTile][NB];
    for (int r = 0; r < kTile; ++r)
      for (int b = 0; b < NB; ++b) sums[r][b] = S::load(out + r * fmt.head_dim + d + b * kLanes);
    for (int j = 0; j < total; ++j) {
      const auto first = S::load_half(rows.v[j] + d), second = S::load_half(rows.v[j] + d + kLanes);
      for (int r = 0; r < kTile; ++r) {
        const auto weight = S::splat(p[r * fmt.page_tokens + j]);
        sums[r][0] = S::fma(weight, first, sums[r][0]);
        sums[r][1] = S::fma(weight, second, sums[r][1]);
      }
    }
    for (int r = 0; r < kTile; ++r)
      for (int b = 0; b < NB; ++b) S::store(out + r * fmt.head_dim + d + b * kLanes, sums[r][b]);
  }
}

template <class S>
void attend_own(const Format& fmt, const AttendItem& item, const Query& query, const WidePage& wide, State& state,
                Arena<S> arena) {
  const OwnRows& own = item.own;
  const RowPointers rows = own_rows<S>(fmt, own);
  if (fmt.own_k_codes) widen_own_k<S>(fmt, own, rows, wide, arena);
  const int d = fmt.head_dim, pi = fmt.page_tokens, padded = (own.total + kLanes - 1) / kLanes * kLanes;
  float* scores = arena.template take<float>(kTile * pi);
  for (int r0 = 0; r0 < query.rows; r0 += kTile) {
    const int last = r0 + kTile <= query.rows ? r0 + kTile - 1 : query.rows - 1;
    const int total = item.visible + last / item.group;  // no row of the tile sees more
    if (fmt.own_k_codes) {
      wide_scores<S>(fmt, wide, query, r0, scores);
    } else {
      for (int j = 0; j < total; ++j) exact_scores<S>(query.exact + r0 * d, rows.k[j], d, scores + j, pi);
    }
    for (int r = 0; r < kTile; ++r) {
      const int row = r0 + r <= last ? r0 + r : last;
      const int visible = item.visible + row / item.group;
      own_weights<S>(fmt, state, r0 + r, visible, padded, scores + r * pi);
    }
    own_values<S>(fmt, rows, total, scores, state.out + std::size_t(r0) * d);
  }
}

}  // namespace hack
