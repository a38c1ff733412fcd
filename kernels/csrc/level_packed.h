// Decode on pages of levels: few rows, codes read in their packed order, strips of pages as in packed.h.
#pragma once

#include "level_query.h"
#include "level_scales.h"
#include "packed.h"

namespace hack {

// Consecutive pages of one KV head, and the pages of the next strip, which are prefetched.
struct LevelStrip {
  int pages;
  ConstLevelPage page[kStrip];
  ConstLevelPage next[kStrip];
};

// dots = codes · rows over `elements` of every lane, for NB blocks of lanes from block `block` on; as packed_dots.
template <class S, int bits, bool of_k, int NR, int NB>
[[gnu::always_inline]] inline void level_dots(const BasicLevels<const std::uint8_t>& page,
                                              const BasicLevels<const std::uint8_t>& next,
                                              int block, int elements, const std::uint8_t* rows, int stride,
                                              typename S::I (&dots)[NR][NB]) {
  const int bytes = elements / chunk_of(low_bits(bits)) * kVectorBytes;
  if constexpr (bits != 3) {
    packed_dots<S, bits, NR, NB>(page.codes + block * bytes, next.codes + block * bytes, bytes, bytes / kVectorBytes,
                                 rows, stride, dots);
  } else {
    // A vector of highest bits belongs to two blocks of K, and to two vectors of one block of V.
    constexpr int kBlocks = of_k ? 2 : 1, kVectors = of_k ? 1 : 2;
    const int high_bytes = bytes / kVectors;
    const std::uint8_t *codes = page.codes + block * bytes, *high = page.high + block * bytes / 2;
    const std::uint8_t *next_codes = next.codes + block * bytes, *next_high = next.high + block * bytes / 2;
    unrolled<NR * NB>([&](auto i) { dots[i / NB][i % NB] = S::zero_int(); });
    for (int c = 0; c < high_bytes; c += kVectorBytes) {
      typename S::I tops[NB / kBlocks];
      unrolled<NB / kBlocks>([&](auto b) __attribute__((always_inline)) {
        tops[b] = S::load_int(high + b * high_bytes + c);
        fetch(next_high + b * high_bytes + c);
      });
      unrolled<kVectors>([&](auto vector) __attribute__((always_inline)) {
        const int at = kVectors * c + vector * kVectorBytes;
        typename S::I packed[NB];
        unrolled<NB>([&](auto b) __attribute__((always_inline)) {
          packed[b] = S::load_int(codes + b * bytes + at);
          fetch(next_codes + b * bytes + at);
        });
        unrolled<4>([&](auto f) __attribute__((always_inline)) {
          typename S::I plane[NB];
          unrolled<NB>([&](auto b) __attribute__((always_inline)) {
            constexpr int half = of_k ? b % 2 : vector;
            plane[b] = S::template with_high<4 * half + f>(S::template plane<2, f>(packed[b]), tops[b / kBlocks]);
          });
          unrolled<NR>([&](auto r) __attribute__((always_inline)) {
            const auto quad = S::broadcast_quad(rows + r * stride + at / 4 + kQuad * f);
            unrolled<NB>([&](auto b) { dots[r][b] = S::template dot<3>(dots[r][b], plane[b], quad); });
          });
        });
      });
    }
  }
}

// Products [NR, Π] of rows r0.. with a page: scores without the query rows' scales.
template <class S, int bits, int NR>
void level_scores(const LevelFormat& fmt, const ConstLevelPage& page, const ConstLevelPage& next,
                  const LevelQuery& query, int r0, float* scores) {
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  const auto* rows = reinterpret_cast<const std::uint8_t*>(query.codes + std::size_t(r0) * d);
  each_block<S>(
      pi, [&](int t, auto blocks) __attribute__((always_inline)) {
        constexpr int NB = blocks;
        typename S::I dots[NR][NB];
        typename S::F scale[NB];
        level_dots<S, bits, true, NR, NB>(page.k, next.k, t / kLanes, d, rows, d, dots);
        unrolled<NB>([&](auto b) __attribute__((always_inline)) {
          scale[b] = load_row_scales<S>(fmt, page.k.scale, t + b * kLanes);
          fetch(fmt.scale_of(next.k.scale, t + b * kLanes));
        });
        unrolled<NR * NB>([&](auto i) __attribute__((always_inline)) {
          constexpr int r = i / NB, b = i % NB;
          const auto correction = S::splat(zero_point(bits) * query.sums[r0 + r]);
          const auto product = S::mul(S::sub(S::to_float(dots[r][b]), correction), scale[b]);
          S::store(scores + r * pi + t + b * kLanes, product);
        });
      });
}

// P·V of NR rows with a page, added to `out` [NR, D].
template <class S, int bits, int NR>
void level_values(const LevelFormat& fmt, const ConstLevelPage& page, const ConstLevelPage& next,
                  const std::uint8_t* p, const LevelMerge* merges, float* out) {
  const int pi = fmt.page_tokens;
  each_block<S, 1>(
      fmt.head_dim, [&](int d, auto blocks) __attribute__((always_inline)) {
        constexpr int NB = blocks;
        typename S::I dots[NR][NB];
        level_dots<S, bits, false, NR, NB>(page.v, next.v, d / kLanes, pi, p, pi, dots);
        unrolled<NR * NB>([&](auto i) __attribute__((always_inline)) {
          constexpr int r = i / NB, b = i % NB;
          float* at = out + r * fmt.head_dim + d + b * kLanes;
          const auto exact = S::sub(S::to_float(dots[r][b]), S::splat(merges[r].correction));
          S::store(at, S::fma(S::splat(merges[r].take), exact, S::load(at)));
        });
      });
}

// use(first, count) for NR rows, as many at a time as have their sums in registers.
template <class S, int NR, class Use>
[[gnu::always_inline]] inline void each_tile_rows(Use use) {
  constexpr int kRows = S::kTileRows;
  unrolled<(NR + kRows - 1) / kRows>([&](auto part) __attribute__((always_inline)) {
    constexpr int first = part * kRows, count = NR - first < kRows ? NR - first : kRows;
    use(std::integral_constant<int, first>{}, std::integral_constant<int, count>{});
  });
}

// level_scores and level_values for NR rows, up to kTile.
template <class S, int bits, int NR>
void tile_scores(const LevelFormat& fmt, const ConstLevelPage& page, const ConstLevelPage& next,
                 const LevelQuery& query, int r0, float* scores) {
  each_tile_rows<S, NR>([&](auto first, auto count) __attribute__((always_inline)) {
    level_scores<S, bits, count>(fmt, page, next, query, r0 + first, scores + first * fmt.page_tokens);
  });
}

template <class S, int bits, int NR>
void tile_values(const LevelFormat& fmt, const ConstLevelPage& page, const ConstLevelPage& next,
                 const std::uint8_t* p, const LevelMerge* merges, float* out) {
  each_tile_rows<S, NR>([&](auto first, auto count) __attribute__((always_inline)) {
    level_values<S, bits, count>(fmt, page, next, p + first * fmt.page_tokens, merges + first,
                                 out + first * fmt.head_dim);
  });
}

// Attention of NR rows to a strip. `scores` is [kStrip, 4, Π]; `v_scale` [Π] and the codes of P [4, Π] are those of one
// page at a time. Weighing takes four rows with the same scales, so a page's rows are padded to four.
template <class S, int NR>
void level_rows(const LevelFormat& fmt, const LevelStrip& strip, const LevelQuery& query, int r0, State& state,
                float* scores, float* v_scale, std::uint8_t* codes) {
  const int pi = fmt.page_tokens;
  const auto scores_of = LevelWidths::with(fmt.k_bits, [](auto bits) { return tile_scores<S, bits, NR>; });
  const auto values_of = LevelWidths::with(fmt.v_bits, [](auto bits) { return tile_values<S, bits, NR>; });
  const float zero = zero_point(fmt.v_bits);
  alignas(64) float tops[kLanes], padded[kTile], takes[kLanes];
  for (int i = 0; i < strip.pages; ++i) {
    float* page_scores = scores + i * kTile * pi;
    scores_of(fmt, strip.page[i], strip.next[i], query, r0, page_scores);
    std::memset(page_scores + NR * pi, 0, sizeof(float) * (kTile - NR) * pi);
    row_maxima<S>(page_scores, pi, padded);
    for (int r = 0; r < NR; ++r) tops[i * NR + r] = padded[r] * query.scale[r0 + r];
  }
  take_maxima<S, NR>(fmt, state, r0, strip.pages, tops, takes);
  for (int i = 0; i < strip.pages; ++i) {
    for (int t = 0; t < pi; t += kLanes) {
      S::store(v_scale + t, load_row_scales<S>(fmt, strip.page[i].v.scale, t));
      fetch(fmt.scale_of(strip.next[i].v.scale, t));
    }
    alignas(64) float scale[kTile];
    for (int r = 0; r < kTile; ++r) {
      padded[r] = r < NR ? tops[i * NR + r] : 0.0f;
      scale[r] = r < NR ? query.scale[r0 + r] : 1.0f;
    }
    LevelWeights weights[kTile];
    LevelMerge merges[NR];
    weigh_levels<S>(scores + i * kTile * pi, pi, scale, padded, v_scale, codes, weights);
    merge_levels<S, NR>(state, r0, zero, takes + i * NR, weights, merges);
    values_of(fmt, strip.page[i], strip.next[i], codes, merges, state.out + std::size_t(r0) * fmt.head_dim);
  }
}

// Attention of every row of the query to the strip.
template <class S>
void attend_packed_levels(const LevelFormat& fmt, const LevelStrip& strip, const LevelQuery& query, State& state,
                          Arena<S> arena) {
  float* scores = arena.template take<float>(std::size_t(kStrip) * kTile * fmt.page_tokens);
  float* v_scale = arena.template take<float>(fmt.page_tokens);
  auto* codes = arena.template take<std::uint8_t>(std::size_t(kTile) * fmt.page_tokens);
  for (int r = 0; r < query.rows; r += kTile) {
    with_constant<kTile>(query.rows - r, [&](auto rows) {
      constexpr int count = decltype(rows)::value;
      level_rows<S, count>(fmt, strip, query, r, state, scores, v_scale, codes);
    });
  }
}

}  // namespace hack
