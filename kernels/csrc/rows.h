// Attention in FP32 to pages whose values can be read one by one. Kind::kRows is the first of them: pages of FP16 rows,
// [Π, D] for K and for V, for codec `fp16`. The caller seals, installs and exports these pages by copying.
//
// A kind of page gives a class that opens a page and hands out its K and V as *readers*. `at(t, c)` gives 16 channels
// of row t, from c on, in FP32; `fetch(t, c)` prefetches what `at(t, c)` reads. Few query rows read a page as it rests,
// with the conversion fused into the products. For many, a page is converted to FP32 once. page_tokens and head_dim
// must be multiples of 32; for FP16 rows a head_dim that is a multiple of 16 will do.
#pragma once

#include "exact_lanes.h"
#include "row_format.h"

namespace hack {

struct RowPage {
  const std::uint16_t* k;
  const std::uint16_t* v;
};

template <class S>
RowPage row_page(const PageFormat& fmt, const Pool& pool, std::int64_t id, int head) {
  const Planes page = pool.page(fmt, id, head);
  return {reinterpret_cast<const std::uint16_t*>(page.at[0]), reinterpret_cast<const std::uint16_t*>(page.at[1])};
}

// Reads FP16 rows [Π, D].
template <class S>
struct HalfRows {
  const std::uint16_t* rows;
  int d;

  [[gnu::always_inline]] typename S::F at(int t, int c) const { return S::load_half(rows + t * d + c); }
  [[gnu::always_inline]] void fetch(int t, int c) const {
    if (c % (2 * kLanes) == 0) hack::fetch(rows + t * d + c);
  }
};

// Pages of FP16 rows of one KV head, one of them open.
template <class S>
class RowPages {
 public:
  // Query rows up to which converting a page to FP32 costs more than reading it again for every four rows.
  static constexpr int kRestingRows = 12;

  RowPages(const PageFormat& fmt, const Pool& pool, int head, Arena<S>&) : fmt_(fmt), pool_(pool), head_(head) {}

  // Page `id`; page `next` will be read after it.
  void open(std::int64_t id, std::int64_t next) {
    page_ = row_page<S>(fmt_, pool_, id, head_);
    next_ = row_page<S>(fmt_, pool_, next, head_);
  }
  // use(reader, reader of the next page)
  template <class Use>
  [[gnu::always_inline]] void with_keys(Use use) const {
    use(HalfRows<S>{page_.k, fmt_.head_dim}, HalfRows<S>{next_.k, fmt_.head_dim});
  }
  template <class Use>
  [[gnu::always_inline]] void with_values(Use use) const {
    use(HalfRows<S>{page_.v, fmt_.head_dim}, HalfRows<S>{next_.v, fmt_.head_dim});
  }

 private:
  const PageFormat& fmt_;
  const Pool& pool_;
  int head_;
  RowPage page_{}, next_{};
};

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

// Scores of NR rows with the keys of a page, read as they rest; the next page's keys are prefetched.
template <class S, int NR, class Reader>
void resting_scores(const PageFormat& fmt, const Reader& k, const Reader& next, const float* q, float* scores) {
  constexpr int NK = S::kTileBlocks;  // keys that share one load of Q
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  for (int t = 0; t < pi; t += NK) {
    typename S::F dots[NK][kTile];
    unrolled<NK * kTile>([&](auto i) { dots[i / kTile][i % kTile] = S::zero(); });
    for (int c = 0; c < d; c += kLanes) {
      typename S::F keys[NK];
      unrolled<NK>([&](auto n) __attribute__((always_inline)) {
        keys[n] = k.at(t + n, c);
        next.fetch(t + n, c);
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
template <class S, int NR, class Reader>
void resting_values(const PageFormat& fmt, const Reader& v, const Reader& next, const float* p, float* out) {
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  each_block<S, std::is_same_v<Reader, HalfRows<S>> ? 1 : 2>(
      d, [&](int c, auto blocks) __attribute__((always_inline)) {
        constexpr int NB = blocks;
        typename S::F sums[NR][NB];
        unrolled<NR * NB>([&](auto i) { sums[i / NB][i % NB] = S::load(out + i / NB * d + c + i % NB * kLanes); });
        for (int t = 0; t < pi; ++t) {
          typename S::F values[NB];
          unrolled<NB>([&](auto b) __attribute__((always_inline)) {
            values[b] = v.at(t, c + b * kLanes);
            next.fetch(t, c + b * kLanes);
          });
          unrolled<NR>([&](auto r) __attribute__((always_inline)) {
            const auto weight = S::splat(p[r * pi + t]);
            unrolled<NB>([&](auto b) { sums[r][b] = S::fma(weight, values[b], sums[r][b]); });
          });
        }
        unrolled<NR * NB>([&](auto i) { S::store(out + i / NB * d + c + i % NB * kLanes, sums[i / NB][i % NB]); });
      });
}

template <class S, class Pages>
void attend_resting(const PageFormat& fmt, Pages& pages, const AttendItem& item, const Query& query, State& state,
                    float* scores) {
  const int d = fmt.head_dim;
  for (std::int64_t i = item.first; i < item.last; ++i) {
    pages.open(item.page_ids[i], item.page_ids[i + 1 < item.last ? i + 1 : i]);
    each_tile(query.rows, [&](auto rows, int r) {
      pages.with_keys([&](const auto& k, const auto& next) {
        resting_scores<S, rows>(fmt, k, next, query.exact + r * d, scores);
      });
      weigh_rows<S, rows>(fmt, state, r, scores);
      pages.with_values([&](const auto& v, const auto& next) {
        resting_values<S, rows>(fmt, v, next, scores, state.out + std::size_t(r) * d);
      });
    });
  }
}

// Many rows: every page is opened once for all.
template <class S, class Pages, class Exact>
void attend_opened(const PageFormat& fmt, Pages& pages, const AttendItem& item, const Query& query, Arena<S>& arena) {
  const LaneState state = make_lane_state<S>(fmt, query.rows, arena);
  float* scores = arena.template take<float>(std::size_t(S::kLaneVectors) * kLanes * fmt.page_tokens);
  Exact exact(fmt, item, query, arena);
  [[maybe_unused]] const typename Exact::Unit unit;
  for (std::int64_t i = item.first; i < item.last; ++i) {
    pages.open(item.page_ids[i], item.page_ids[i]);
    pages.with_keys([&](const auto& k, const auto&) __attribute__((always_inline)) {
      pages.with_values([&](const auto& v, const auto&) __attribute__((always_inline)) {
        exact.open(fmt.page_tokens, [&](int t, int c) __attribute__((always_inline)) { return k.at(t, c); },
                   [&](int t, int c) __attribute__((always_inline)) { return v.at(t, c); });
      });
    });
    attend_open_page<S>(fmt, exact, query.rows, state, scores, fmt.page_tokens, [&](int) { return fmt.page_tokens; });
  }
  attend_exact_lanes<S>(fmt, item, exact, state, scores);
  write_lanes<S>(fmt, item, state);
}

// Attention to pages that `Pages` reads; prompts take the products of `Exact`.
template <class S, class Pages, class Exact = FloatLanes<S>>
void attend_by_reading(const PageFormat& fmt, const Pool& pool, const AttendItem& item, std::byte* scratch) {
  Arena<S> arena(scratch);
  const Query query = make_query<S>(fmt, item, arena);
  Pages pages(fmt, pool, item.head, arena);
  if (query.rows > Pages::kRestingRows) return attend_opened<S, Pages, Exact>(fmt, pages, item, query, arena);
  State state = make_state<S>(fmt, query.rows, arena);
  float* scores = arena.template take<float>(kTile * fmt.page_tokens);
  attend_resting<S>(fmt, pages, item, query, state, scores);
  if (item.own.total > 0) attend_own_exactly<S>(fmt, item, query, state, arena);
  write_state<S>(fmt, item, query.rows, state);
}

// `PageOperations::read` for pages that `Pages` reads. Values beyond FP16 become its largest.
template <class S, class Pages>
void read_by_reading(const PageFormat& fmt, const Pool& pool, std::int64_t id, int head, std::uint16_t* k,
                     std::uint16_t* v, std::byte* scratch) {
  Arena<S> arena(scratch);
  Pages pages(fmt, pool, head, arena);
  pages.open(id, id);
  const auto write = [&](const auto& reader, std::uint16_t* out) __attribute__((always_inline)) {
    const auto most = S::splat(65504.0f), least = S::splat(-65504.0f);
    for (int t = 0; t < fmt.page_tokens; ++t)
      for (int c = 0; c < fmt.head_dim; c += kLanes)
        S::store_half(out + t * fmt.head_dim + c, S::max(S::min(reader.at(t, c), most), least));
  };
  pages.with_keys([&](const auto& reader, const auto&) { write(reader, k); });
  pages.with_values([&](const auto& reader, const auto&) { write(reader, v); });
}

template <class S, class Exact = FloatLanes<S>>
constexpr std::size_t rows_scratch_bytes(const PageFormat& fmt, int rows) {
  const std::size_t scores = 4 * S::kLaneVectors * kLanes * std::size_t(fmt.page_tokens);
  return query_scratch_bytes(fmt, rows) + lane_scratch_bytes(fmt, rows) + Exact::scratch_bytes(fmt, rows) + scores;
}

template <class S>
constexpr PageOperations rows_operations() {
  PageOperations operations;
  operations.attend = attend_by_reading<S, RowPages<S>>;
  operations.scratch_bytes = rows_scratch_bytes<S>;
  operations.alone_work = 24;
  return operations;
}

// The operations of a kind whose pages `Pages` reads.
template <class S, class Pages>
constexpr PageOperations reading_operations(decltype(PageOperations::seal) seal,
                                            decltype(PageOperations::scratch_bytes) scratch_bytes,
                                            std::int64_t alone_work = 24) {
  PageOperations operations;
  operations.seal = seal;
  operations.attend = attend_by_reading<S, Pages>;
  operations.read = read_by_reading<S, Pages>;
  operations.scratch_bytes = scratch_bytes;
  operations.alone_work = alone_work;
  return operations;
}

}  // namespace hack
