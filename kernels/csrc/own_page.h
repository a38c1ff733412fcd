// Pages that a query sees exactly, among them its own page (the open-page rule): FP32 arithmetic on FP16 rows. A kind
// of page may define its own scores.
#pragma once

#include "query.h"
#include "unrolled.h"

namespace hack {

struct RowPointers {
  const std::uint16_t* k[kMaxPageTokens];
  const std::uint16_t* v[kMaxPageTokens];
};

// The number of lanes in whole blocks (`each_block`) for `keys` keys.
constexpr int exact_lanes(int keys) {
  return (keys + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
}

template <class S>
RowPointers row_pointers(const PageFormat& fmt, const ExactRows& exact) {
  RowPointers rows;
  for (int j = 0; j < exact.total; ++j) {
    const bool old = j < exact.old;
    const std::int64_t at = old ? std::int64_t(j) * fmt.head_dim : (j - exact.old) * exact.stride;
    rows.k[j] = (old ? exact.slot_k : exact.k) + at;
    rows.v[j] = (old ? exact.slot_v : exact.v) + at;
  }
  return rows;
}

// The first `total` keys of a page as FP32 [D, Π], a key in each lane; up to `exact_lanes` they are filled up with 0.
template <class S>
void transpose_keys(const PageFormat& fmt, const RowPointers& rows, int total, float* keys) {
  for (int t = 0; t < exact_lanes(total); t += kLanes) {
    for (int d = 0; d < fmt.head_dim; d += kLanes) {
      typename S::F block[kLanes];
      for (int j = 0; j < kLanes; ++j) block[j] = t + j < total ? S::load_half(rows.k[t + j] + d) : S::zero();
      S::transpose(block);
      for (int i = 0; i < kLanes; ++i) S::store(keys + (d + i) * fmt.page_tokens + t, block[i]);
    }
  }
}

// Scores [kTile, Π] of kTile exact rows with `total` keys; every sum goes over the channels in order.
template <class S>
void exact_scores(const PageFormat& fmt, const float* q, const float* keys, int total, float* scores) {
  constexpr int NR = S::kTileRows;
  const int d = fmt.head_dim, pi = fmt.page_tokens;
  for (int r0 = 0; r0 < kTile; r0 += NR, q += NR * d, scores += NR * pi) {
    each_block<S>(exact_lanes(total), [&](int t, auto blocks) __attribute__((always_inline)) {
      constexpr int NB = blocks;
      typename S::F sums[NR][NB];
      unrolled<NR * NB>([&](auto i) { sums[i / NB][i % NB] = S::zero(); });
      for (int channel = 0; channel < d; ++channel) {
        typename S::F key[NB];
        unrolled<NB>([&](auto b) { key[b] = S::load(keys + channel * pi + t + b * kLanes); });
        unrolled<NR>([&](auto r) __attribute__((always_inline)) {
          const auto value = S::splat(q[r * d + channel]);
          unrolled<NB>([&](auto b) { sums[r][b] = S::fma(value, key[b], sums[r][b]); });
        });
      }
      unrolled<NR * NB>([&](auto i) { S::store(scores + i / NB * pi + t + i % NB * kLanes, sums[i / NB][i % NB]); });
    });
  }
}

// Turns the scores of one row into weights, in place, and adds them to the state. Keys past `visible` weigh 0.
template <class S>
void own_weights(const PageFormat& fmt, State& state, int row, int visible, int padded, float* scores) {
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

// NB blocks of channels of out += P·V for kTile rows; p is [kTile, Π].
template <class S, int NB>
void own_values(const PageFormat& fmt, const RowPointers& rows, int total, const float* p, int d, float* out) {
  typename S::F sums[kTile][NB];
  for (int r = 0; r < kTile; ++r)
    for (int b = 0; b < NB; ++b) sums[r][b] = S::load(out + r * fmt.head_dim + d + b * kLanes);
  for (int j = 0; j < total; ++j) {
    typename S::F values[NB];
    for (int b = 0; b < NB; ++b) values[b] = S::load_half(rows.v[j] + d + b * kLanes);
    for (int r = 0; r < kTile; ++r) {
      const auto weight = S::splat(p[r * fmt.page_tokens + j]);
      for (int b = 0; b < NB; ++b) sums[r][b] = S::fma(weight, values[b], sums[r][b]);
    }
  }
  for (int r = 0; r < kTile; ++r)
    for (int b = 0; b < NB; ++b) S::store(out + r * fmt.head_dim + d + b * kLanes, sums[r][b]);
}

template <class S>
void own_values(const PageFormat& fmt, const RowPointers& rows, int total, const float* p, float* out) {
  constexpr int NB = S::kTileRows * S::kTileBlocks >= 2 * kTile ? 2 : 1;  // as many sums as fit in registers
  int d = 0;
  for (; d + NB * kLanes <= fmt.head_dim; d += NB * kLanes) own_values<S, NB>(fmt, rows, total, p, d, out);
  if (d < fmt.head_dim) own_values<S, 1>(fmt, rows, total, p, d, out);
}

// Attention to the first `most` rows of a page. Row r of the query sees the first seen(r) of them; seen(r) does not
// fall as r grows. score(r0, total, scores) gives the scores [kTile, Π] of rows r0.. with the first `total` keys.
template <class S, class Seen, class Score>
void attend_page_rows(const PageFormat& fmt, const Query& query, const RowPointers& rows, int most, State& state,
                      float* scores, Seen seen, Score score) {
  const int pi = fmt.page_tokens, padded = (most + kLanes - 1) / kLanes * kLanes;
  for (int r0 = 0; r0 < query.rows; r0 += kTile) {
    const int last = r0 + kTile <= query.rows ? r0 + kTile - 1 : query.rows - 1;
    const int total = seen(last);  // the most keys that a row of the tile sees
    score(r0, total, scores);
    for (int r = 0; r < kTile; ++r) {
      const int row = r0 + r <= last ? r0 + r : last;
      own_weights<S>(fmt, state, r0 + r, seen(row), padded, scores + r * pi);
    }
    own_values<S>(fmt, rows, total, scores, state.out + std::size_t(r0) * fmt.head_dim);
  }
}

template <class S, class Score>
void attend_own(const PageFormat& fmt, const AttendItem& item, const Query& query, const RowPointers& rows,
                State& state, float* scores, Score score) {
  const auto seen = [&](int row) { return item.visible + row / item.group; };
  attend_page_rows<S>(fmt, query, rows, item.own.total, state, scores, seen, score);
}

template <class S, class Seen>
void attend_exactly(const PageFormat& fmt, const ExactRows& exact, const Query& query, State& state, Arena<S> arena,
                    Seen seen) {
  const RowPointers rows = row_pointers<S>(fmt, exact);
  float* page_scores = arena.template take<float>(kTile * fmt.page_tokens);
  float* keys = arena.template take<float>(fmt.elements());
  transpose_keys<S>(fmt, rows, exact.total, keys);
  attend_page_rows<S>(fmt, query, rows, exact.total, state, page_scores, seen, [&](int r0, int total, float* scores) {
    exact_scores<S>(fmt, query.exact + r0 * fmt.head_dim, keys, total, scores);
  });
}

template <class S>
void attend_own_exactly(const PageFormat& fmt, const AttendItem& item, const Query& query, State& state,
                        Arena<S> arena) {
  attend_exactly<S>(fmt, item.own, query, state, arena, [&](int row) { return item.visible + row / item.group; });
}

template <class S>
void attend_earlier_exactly(const PageFormat& fmt, const AttendItem& item, const Query& query, State& state,
                            Arena<S> arena) {
  for (int i = 0; i < item.earlier_count; ++i)
    attend_exactly<S>(fmt, item.earlier[i], query, state, arena, [&](int) { return fmt.page_tokens; });
}

}  // namespace hack
