// Decode: few rows against pages, with codes read directly from their packed order. Symmetric form only.
//
// Pages are processed in strips: all scores, then all weights, then all products with V. The softmax of one page is a
// chain of dependent instructions; the chains of a strip overlap.
#pragma once

#include "softmax.h"
#include "unrolled.h"

namespace hack {

inline constexpr int kStrip = kLanes / kTile;  // pages per strip: one vector holds a number for each of their rows

// Consecutive pages of one KV head, and the pages of the next strip, which are prefetched.
struct Strip {
  int pages;
  ConstHackPage page[kStrip];
  ConstHackPage next[kStrip];
};

// dots = codes · rows, over `chunks` vectors of NB blocks of lanes. Rows are `stride` bytes apart, blocks follow one
// another, and the cache lines at `next` are prefetched.
template <class S, int bits, int NR, int NB>
[[gnu::always_inline]] inline void packed_dots(const std::uint8_t* codes, const std::uint8_t* next, int block_bytes,
                                               int chunks, const std::uint8_t* rows, int stride,
                                               typename S::I (&dots)[NR][NB]) {
  unrolled<NR * NB>([&](auto i) { dots[i / NB][i % NB] = S::zero_int(); });
  for (int c = 0; c < chunks; ++c, codes += kVectorBytes, next += kVectorBytes, rows += chunk_of(bits)) {
    typename S::I packed[NB];
    unrolled<NB>([&](auto b) __attribute__((always_inline)) {
      packed[b] = S::load_int(codes + b * block_bytes);
      fetch(next + b * block_bytes);
    });
    unrolled<planes_of(bits)>([&](auto f) __attribute__((always_inline)) {
      typename S::I plane[NB];
      unrolled<NB>([&](auto b) { plane[b] = S::template plane<bits, f>(packed[b]); });
      unrolled<NR>([&](auto r) __attribute__((always_inline)) {
        const auto quad = S::broadcast_quad(rows + r * stride + kQuad * f);
        unrolled<NB>([&](auto b) { dots[r][b] = S::template dot<bits>(dots[r][b], plane[b], quad); });
      });
    });
  }
}

// Scores [NR, Π] of rows r0.. with a page.
template <class S, int bits, int NR>
void packed_scores(const HackFormat& fmt, const ConstHackPage& page, const ConstHackPage& next, const HackQuery& query,
                   int r0, float* scores) {
  const int groups = fmt.k_groups(), pi = fmt.page_tokens, chunks = fmt.k_partition / chunk_of(bits);
  const int group_bytes = chunks * kVectorBytes, block_bytes = groups * group_bytes;
  each_block<S>(
      pi, [&](int t, auto blocks) __attribute__((always_inline)) {
        constexpr int NB = blocks;
        for (int g = 0; g < groups; ++g) {
          typename S::I dots[NR][NB];
          const int at_codes = t / kLanes * block_bytes + g * group_bytes;
          const auto* rows =
              reinterpret_cast<const std::uint8_t*>(query.codes + r0 * fmt.head_dim + g * fmt.k_partition);
          packed_dots<S, bits, NR, NB>(page.k_codes + at_codes, next.k_codes + at_codes, block_bytes, chunks, rows,
                                       fmt.head_dim, dots);
          const float *q_scale = query.scale + g * query.padded + r0, *q_sums = query.sums + g * query.padded + r0;
          typename S::F scale[NB], minimum[NB];
          unrolled<NB>([&](auto b) __attribute__((always_inline)) {
            const int at = g * pi + t + b * kLanes;
            scale[b] = S::load_half(page.k_scale + at);
            minimum[b] = S::load_half(page.k_min + at);
            fetch(next.k_scale + at);
            fetch(next.k_min + at);
          });
          unrolled<NR * NB>([&](auto i) __attribute__((always_inline)) {
            constexpr int r = i / NB, b = i % NB;
            float* score = scores + r * pi + t + b * kLanes;
            const auto sum = g == 0 ? S::zero() : S::load(score);
            S::store(score, add_product<S>(sum, S::to_float(dots[r][b]), scale[b], minimum[b], q_scale[r], q_sums[r]));
          });
        }
      });
}

// P·V of NR rows with a page, added to `out` [NR, D].
template <class S, int bits, int NR>
void packed_values(const HackFormat& fmt, const ConstHackPage& page, const ConstHackPage& next, const std::uint8_t* p,
                   const RowMerge* merges, float* out) {
  const int chunks = fmt.page_tokens / chunk_of(bits), block_bytes = chunks * kVectorBytes;
  each_block<S>(
      fmt.head_dim, [&](int d, auto blocks) __attribute__((always_inline)) {
        constexpr int NB = blocks;
        typename S::I dots[NR][NB];
        const int at_codes = d / kLanes * block_bytes;
        packed_dots<S, bits, NR, NB>(page.v_codes + at_codes, next.v_codes + at_codes, block_bytes, chunks, p,
                                     fmt.page_tokens, dots);
        typename S::F scale[NB], minimum[NB];
        unrolled<NB>([&](auto b) __attribute__((always_inline)) {
          const int channel = d + b * kLanes;
          scale[b] = S::load_half(page.v_scale + channel);
          minimum[b] = S::load_half(page.v_min + channel);
          fetch(next.v_scale + channel);
          fetch(next.v_min + channel);
        });
        unrolled<NR * NB>([&](auto i) __attribute__((always_inline)) {
          constexpr int r = i / NB, b = i % NB;
          float* at = out + r * fmt.head_dim + d + b * kLanes;
          S::store(at, add_product<S>(S::load(at), S::to_float(dots[r][b]), scale[b], minimum[b], merges[r].take,
                                      merges[r].sum));
        });
      });
}

// Attention of NR rows to a strip; `scores` and `codes` of P are [kStrip, NR, Π]. Weights are computed for four rows at
// a time, which may belong to several pages, just before the first of these pages needs them: the products of one page
// hide the softmax chains of the next.
template <class S, int NR>
void packed_rows(const HackFormat& fmt, const Strip& strip, const HackQuery& query, int r0, State& state, float* scores,
                 std::uint8_t* codes) {
  const int pi = fmt.page_tokens, rows = strip.pages * NR;
  const auto scores_of = with_width<S>(fmt.k_bits, [](auto width) { return width.template scores<NR>; });
  const auto values_of = with_width<S>(fmt.v_bits, [](auto width) { return width.template values<NR>; });
  for (int i = 0; i < strip.pages; ++i) scores_of(fmt, strip.page[i], strip.next[i], query, r0, scores + i * NR * pi);
  if (rows % kTile != 0) std::memset(scores + rows * pi, 0, sizeof(float) * (kTile - rows % kTile) * pi);
  alignas(64) float tops[kLanes], takes[kLanes];
  for (int row = 0; row < rows; row += kTile) row_maxima<S>(scores + row * pi, pi, tops + row);
  take_maxima<S, NR>(fmt, state, r0, strip.pages, tops, takes);
  PageWeights weights[kLanes];
  for (int i = 0, weighed = 0; i < strip.pages; ++i) {
    for (; weighed < (i + 1) * NR; weighed += kTile)
      weigh_symmetric<S>(scores + weighed * pi, pi, tops + weighed, codes + weighed * pi, weights + weighed);
    RowMerge merges[NR];
    merge_weights<S, NR>(fmt, state, r0, takes + i * NR, weights + i * NR, merges);
    values_of(fmt, strip.page[i], strip.next[i], codes + i * NR * pi, merges,
              state.out + std::size_t(r0) * fmt.head_dim);
  }
}

// Attention of every row of the query to the strip.
template <class S>
void attend_packed(const HackFormat& fmt, const Strip& strip, const HackQuery& query, State& state, Arena<S> arena) {
  float* scores = arena.template take<float>(kLanes * fmt.page_tokens);
  auto* codes = arena.template take<std::uint8_t>(kLanes * fmt.page_tokens);
  for (int r = 0; r < query.rows; r += S::kTileRows) {
    with_constant<S::kTileRows>(query.rows - r,
                                [&](auto rows) { packed_rows<S, rows>(fmt, strip, query, r, state, scores, codes); });
  }
}

}  // namespace hack
