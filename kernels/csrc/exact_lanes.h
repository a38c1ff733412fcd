// Prefill on pages that are seen exactly: pages of FP16 rows, or pages that a reader gives (rows.h). `FloatLanes`
// multiplies in FP32; an instruction set may have another class of that form (amx_pairs.h).
#pragma once

#include "lane_products.h"
#include "lanes.h"
#include "own_page.h"

namespace hack {

// Products of a query with one page at a time, in FP32. Every sum goes over the channels, or the tokens, in order.
template <class S>
class FloatLanes {
 public:
  using Unit = NoUnit;

  static constexpr std::size_t scratch_bytes(const PageFormat& fmt, int rows) {
    return 4 * (lane_rows(rows) * std::size_t(fmt.head_dim) + 2 * fmt.elements()) + 64 * 4;
  }

  // Scores are in units of log2, as those of `Query::exact`.
  FloatLanes(const PageFormat& fmt, const AttendItem&, const Query& query, Arena<S>& arena) : fmt_(fmt) {
    const std::size_t d = fmt.head_dim;
    q_ = arena.template take<float>(lane_rows(query.rows) * d);
    k_ = arena.template take<float>(fmt.elements());
    v_ = arena.template take<float>(fmt.elements());
    to_lanes<S>(reinterpret_cast<const std::byte*>(query.exact), 4 * d, query.rows, int(d), int(d),
                reinterpret_cast<std::byte*>(q_));
  }

  // The first `total` rows of a page; k(t, c) and v(t, c) are channels c .. c + 15 of row t.
  template <class K, class V>
  [[gnu::always_inline]] void open(int total, K k, V v) {
    const int d = fmt_.head_dim;
    total_ = (total + kLaneRows - 1) / kLaneRows * kLaneRows;
    for (int t = 0; t < total_; ++t) {
      for (int c = 0; c < d; c += kLanes) {
        S::store(k_ + t * d + c, t < total ? k(t, c) : S::zero());
        S::store(v_ + t * d + c, t < total ? v(t, c) : S::zero());
      }
    }
  }
  // The number of rows that the products take, a multiple of 4. Rows past those given are zeros.
  int total() const { return total_; }
  // The factor by which scores still have to be multiplied.
  float scale() const { return 1.0f; }

  // [total, NV, 16] of the tile from r0 on.
  template <int NV>
  void scores(int r0, float* out) const {
    const int d = fmt_.head_dim;
    lane_products<FloatUnit<S>, kLaneRows, NV, false>({words(k_), d, 1}, total_, d, q_ + std::size_t(r0) * d, out);
  }
  // out [D, NV, 16] += P·V for p [total, NV, 16].
  template <int NV>
  void add_values(float* p, float* out) const {
    const int d = fmt_.head_dim;
    lane_products<FloatUnit<S>, kLaneRows, NV, true>({words(v_), 1, d}, d, total_, p, out);
  }

 private:
  static constexpr int kLaneRows = S::kLaneRows;
  static const std::uint32_t* words(const float* values) { return reinterpret_cast<const std::uint32_t*>(values); }

  const PageFormat& fmt_;
  float* q_;  // tiles [D, NV, 16]
  float* k_;  // [total, D]
  float* v_;
  int total_ = 0;
};

// Turns scores [total, NV, 16] times `scale` into weights relative to the state's maxima, in place, and adds them to
// the state. With `seen`, the tile's row r sees the first seen[r] keys.
template <class S, int NV>
void weigh_exact_lanes(const PageFormat& fmt, const LaneState& state, int r0, int total, float scale, const float* seen,
                       float* scores) {
  constexpr float slope = -2 * kUnseen;
  const auto factor = S::splat(scale);
  typename S::F tops[NV], sums[NV];
  for (auto& top : tops) top = S::splat(kUnseen);
  for (int t = 0; t < total; ++t) {
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      float* at = scores + (t * NV + v) * kLanes;
      auto score = S::load(at);
      if (seen != nullptr) {  // far above any score for keys that are seen, else kUnseen or below
        const auto bound = S::fma(S::load(seen + v * kLanes), S::splat(slope), S::splat(-(float(t) + 0.5f) * slope));
        score = S::min(score, bound);
        S::store(at, score);
      }
      tops[v] = S::max(tops[v], score);
    });
  }
  unrolled<NV>([&](auto v) { tops[v] = S::mul(tops[v], factor); });
  lift_tops<S, NV>(fmt, state, r0, tops);
  unrolled<NV>([&](auto v) {
    tops[v] = S::sub(S::zero(), S::load(state.top + r0 + v * kLanes));
    sums[v] = S::zero();
  });
  for (int t = 0; t < total; ++t) {
    unrolled<NV>([&](auto v) __attribute__((always_inline)) {
      float* at = scores + (t * NV + v) * kLanes;
      const auto p = exp2<S>(S::fma(S::load(at), factor, tops[v]));
      S::store(at, p);
      sums[v] = S::add(sums[v], p);
    });
  }
  unrolled<NV>([&](auto v) {
    float* weight = state.weight + r0 + v * kLanes;
    S::store(weight, S::add(S::load(weight), sums[v]));
  });
}

// Attention to the page that `products` has open. Row r of the query sees the page's first seen(r) keys; seen(r) does
// not fall as r grows. All rows see the first `whole` keys. `scores` is [Π, NV, 16].
template <class S, class Products, class Seen>
void attend_open_page(const PageFormat& fmt, Products& products, int rows, const LaneState& state, float* scores,
                      int whole, Seen seen) {
  each_lane_tile<S>(rows, [&](int r0, auto vectors) {
    constexpr int NV = vectors;
    alignas(64) float of_rows[NV * kLanes];
    const bool masks = whole < products.total();
    for (int r = 0; masks && r < NV * kLanes; ++r) of_rows[r] = float(seen(r0 + r < rows ? r0 + r : rows - 1));
    products.template scores<NV>(r0, scores);
    weigh_exact_lanes<S, NV>(fmt, state, r0, products.total(), products.scale(), masks ? of_rows : nullptr, scores);
    products.template add_values<NV>(scores, state.out + std::size_t(r0) * fmt.head_dim);
  });
}

// Attention to the pages that an item sees exactly, its own last.
template <class S, class Products>
void attend_exact_lanes(const PageFormat& fmt, const AttendItem& item, Products& products, const LaneState& state,
                        float* scores) {
  const int rows = item.tokens * item.group;
  const auto open = [&](const ExactRows& exact, int total) {
    const RowPointers page = row_pointers<S>(fmt, exact);
    products.open(total, [&](int t, int c) { return S::load_half(page.k[t] + c); },
                  [&](int t, int c) { return S::load_half(page.v[t] + c); });
  };
  for (int i = 0; i < item.earlier_count; ++i) {
    open(item.earlier[i], fmt.page_tokens);
    attend_open_page<S>(fmt, products, rows, state, scores, fmt.page_tokens, [&](int) { return fmt.page_tokens; });
  }
  if (item.own.total == 0) return;
  open(item.own, item.own.total);
  attend_open_page<S>(fmt, products, rows, state, scores, item.visible,
                      [&](int row) { return item.visible + row / item.group; });
}

}  // namespace hack
