// Kind::kRows: pages of FP16 rows, [Π, D] for K and for V; exact attention in FP32, for codec `fp16`. They are sealed,
// installed and exported by copying, which the caller does.
//
// Few query rows read the pages as they rest; for many, a page is converted to FP32 once. page_tokens and head_dim must
// be multiples of 32.
#pragma once

#include "own_page.h"
#include "row_format.h"

namespace hack {

// Query rows up to which converting a page to FP32 costs more than reading it again for every four rows.
inline constexpr int kRestingRows = 12;

struct RowPage {
  const std::uint16_t* k;
  const std::uint16_t* v;
};

template <class S>
RowPage row_page(const PageFormat& fmt, const Pool& pool, const AttendItem& item, std::int64_t i) {
  const std::size_t at = (std::size_t(item.page_ids[i]) * pool.heads + item.head) * fmt.elements();
  return {reinterpret_cast<const std::uint16_t*>(pool.planes.at[0]) + at,
          reinterpret_cast<const std::uint16_t*>(pool.planes.at[1]) + at};
}

// Both pages lie in one pool; their distance is in bytes, as prefetching needs it.
[[gnu::always_inline]] inline std::int64_t bytes_between(const std::uint16_t* from, const std::uint16_t* to) {
  return reinterpret_cast<const std::byte*>(to) - reinterpret_cast<const std::byte*>(from);
}

// Turns scores [NR, Π] into weights, in place, and adds them to the state.
template <class S, int NR>
void weigh_rows(const PageFormat& fmt, State& state, int r0, float* scores) {
  const int pi = fmt.page_tokens;
  float tops[NR];
  for (int r = 0; r < NR; ++r) tops[r] = S::reduce_max(lane_maxima<S>(scores + r * pi, pi));
  raise_tops<S>(fmt, state, r0, NR, tops);
  for (int r = 0; r < NR; ++r) {
    auto sum = S::zero();
    for (int j = 0; j < pi; j += kLanes) {
      const auto p = exp2<S>(S::sub(S::load(scores + r * pi + j), S::splat(state.top[r0 + r])));
      S::store(scores + r * pi + j, p);
      sum = S::add(sum, p);
    }
    state.weight[r0 + r] += S::reduce_add(sum);
  }
}

// tile(count, r) for the rows r.. of a query, at most kTile at a time.
template <class Tile>
[[gnu::always_inline]] inline void each_tile(int rows, Tile tile) {
  for (int r = 0; r < rows; r += kTile) with_constant<kTile>(rows - r, [&](auto count) { tile(count, r); });
}

// Scores of NR rows with the keys of a page, read as they rest; the next page's keys, `ahead` bytes on, are prefetched.
template <class S, int NR>
void resting_scores(const PageFormat& fmt, const std::uint16_t* k, std::int64_t ahead, const float* q, float* scores) {
  constexpr int NK = S::kTileBlocks;  // keys that share one load of Q
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  for (int t = 0; t < pi; t += NK) {
    typename S::F dots[NK][kTile];
    unrolled<NK * kTile>([&](auto i) { dots[i / kTile][i % kTile] = S::zero(); });
    for (int c = 0; c < d; c += kLanes) {
      typename S::F keys[NK];
      unrolled<NK>([&](auto n) __attribute__((always_inline)) {
        const std::uint16_t* at = k + (t + n) * d + c;
        keys[n] = S::load_half(at);
        if (c % (2 * kLanes) == 0) fetch(reinterpret_cast<const std::byte*>(at) + ahead);
      });
      unrolled<NR>([&](auto r) __attribute__((always_inline)) {
        const auto row = S::load(q + r * d + c);
        unrolled<NK>([&](auto n) { dots[n][r] = S::fma(row, keys[n], dots[n][r]); });
      });
    }
    unrolled<NK>([&](auto n) __attribute__((always_inline)) {
      float sums[kTile];
      S::fold_add(dots[n], sums);
      for (int r = 0; r < NR; ++r) scores[r * pi + t + n] = sums[r];
    });
  }
}

// out [NR, D] += P·V, V as it rests.
template <class S, int NR>
void resting_values(const PageFormat& fmt, const std::uint16_t* v, std::int64_t ahead, const float* p, float* out) {
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  each_block<S>(
      d, [&](int c, auto blocks) __attribute__((always_inline)) {
        constexpr int NB = blocks;
        typename S::F sums[NR][NB];
        unrolled<NR * NB>([&](auto i) { sums[i / NB][i % NB] = S::load(out + i / NB * d + c + i % NB * kLanes); });
        for (int t = 0; t < pi; ++t) {
          typename S::F values[NB];
          unrolled<NB>([&](auto b) __attribute__((always_inline)) {
            const std::uint16_t* at = v + t * d + c + b * kLanes;
            values[b] = S::load_half(at);
            if (b % 2 == 0) fetch(reinterpret_cast<const std::byte*>(at) + ahead);
          });
          unrolled<NR>([&](auto r) __attribute__((always_inline)) {
            const auto weight = S::splat(p[r * pi + t]);
            unrolled<NB>([&](auto b) { sums[r][b] = S::fma(weight, values[b], sums[r][b]); });
          });
        }
        unrolled<NR * NB>([&](auto i) { S::store(out + i / NB * d + c + i % NB * kLanes, sums[i / NB][i % NB]); });
      });
}

// A page in FP32: K transposed, [D, Π], and V [Π, D].
struct FloatPage {
  float* k;
  float* v;
};

template <class S>
void widen_rows(const PageFormat& fmt, const RowPage& page, const FloatPage& wide) {
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  for (std::size_t i = 0; i < fmt.elements(); i += kLanes) S::store(wide.v + i, S::load_half(page.v + i));
  for (int t = 0; t < pi; ++t) {
    for (int c = 0; c < d; c += kLanes) {
      alignas(64) float lanes[kLanes];
      S::store(lanes, S::load_half(page.k + t * d + c));
      for (int i = 0; i < kLanes; ++i) wide.k[(c + i) * pi + t] = lanes[i];
    }
  }
}

// out [NR, lanes] += rows [NR, n] · columns [n, lanes]; rows and out are `n` and `lanes` apart.
template <class S, int NR>
void add_products_of_rows(const float* rows, int n, const float* columns, int lanes, float* out) {
  each_block<S>(
      lanes, [&](int c, auto blocks) __attribute__((always_inline)) {
        constexpr int NB = blocks;
        typename S::F sums[NR][NB];
        unrolled<NR * NB>([&](auto i) { sums[i / NB][i % NB] = S::load(out + i / NB * lanes + c + i % NB * kLanes); });
        for (int j = 0; j < n; ++j) {
          typename S::F column[NB];
          unrolled<NB>([&](auto b) { column[b] = S::load(columns + std::size_t(j) * lanes + c + b * kLanes); });
          unrolled<NR>([&](auto r) __attribute__((always_inline)) {
            const auto x = S::splat(rows[r * n + j]);
            unrolled<NB>([&](auto b) { sums[r][b] = S::fma(x, column[b], sums[r][b]); });
          });
        }
        unrolled<NR * NB>([&](auto i) { S::store(out + i / NB * lanes + c + i % NB * kLanes, sums[i / NB][i % NB]); });
      });
}

template <class S>
void attend_resting(const PageFormat& fmt, const Pool& pool, const AttendItem& item, const Query& query, State& state,
                    float* scores) {
  const int d = fmt.head_dim;
  for (std::int64_t i = item.first; i < item.last; ++i) {
    const RowPage page = row_page<S>(fmt, pool, item, i);
    const RowPage next = row_page<S>(fmt, pool, item, i + 1 < item.last ? i + 1 : i);
    each_tile(query.rows, [&](auto rows, int r) {
      resting_scores<S, rows>(fmt, page.k, bytes_between(page.k, next.k), query.exact + r * d, scores);
      weigh_rows<S, rows>(fmt, state, r, scores);
      resting_values<S, rows>(fmt, page.v, bytes_between(page.v, next.v), scores, state.out + std::size_t(r) * d);
    });
  }
}

template <class S>
void attend_widened(const PageFormat& fmt, const Pool& pool, const AttendItem& item, const Query& query, State& state,
                    float* scores, Arena<S>& arena) {
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  const FloatPage wide{arena.template take<float>(fmt.elements()), arena.template take<float>(fmt.elements())};
  for (std::int64_t i = item.first; i < item.last; ++i) {
    widen_rows<S>(fmt, row_page<S>(fmt, pool, item, i), wide);
    each_tile(query.rows, [&](auto rows, int r) {
      std::memset(scores, 0, sizeof(float) * rows * pi);
      add_products_of_rows<S, rows>(query.exact + r * d, d, wide.k, pi, scores);
      weigh_rows<S, rows>(fmt, state, r, scores);
      add_products_of_rows<S, rows>(scores, pi, wide.v, d, state.out + std::size_t(r) * d);
    });
  }
}

template <class S>
void attend_rows(const PageFormat& fmt, const Pool& pool, const AttendItem& item, std::byte* scratch) {
  Arena<S> arena(scratch);
  const Query query = make_query<S>(fmt, item, arena);
  State state = make_state<S>(fmt, query.rows, arena);
  float* scores = arena.template take<float>(kTile * fmt.page_tokens);
  if (query.rows <= kRestingRows) {
    attend_resting<S>(fmt, pool, item, query, state, scores);
  } else {
    attend_widened<S>(fmt, pool, item, query, state, scores, arena);
  }
  if (item.own.total > 0) attend_own_exactly<S>(fmt, item, query, state, arena);
  write_state<S>(fmt, item, query.rows, state);
}

template <class S>
constexpr std::size_t rows_scratch_bytes(const PageFormat& fmt, int rows) {
  const std::size_t query_in_bf16 = 2 * std::size_t(padded_rows(rows)) * fmt.head_dim;
  return query_scratch_bytes(fmt, rows) + query_in_bf16 + 8 * fmt.elements();
}

template <class S>
constexpr PageOperations rows_operations() {
  PageOperations operations;
  operations.attend = attend_rows<S>;
  operations.scratch_bytes = rows_scratch_bytes<S>;
  operations.alone_work = 24;
  return operations;
}

}  // namespace hack
