// Decode: few rows against a page, codes read straight from their packed order. Symmetric form only.
//
// Codes are touched once per 4 rows and never written: one load, one shift and AND per plane, then integer dots.
#pragma once

#include "softmax.h"
#include "unrolled.h"

namespace hack {

// The planes of one KV head of one page, and of the page that comes next: it is fetched meanwhile.
struct PackedPage {
  ConstPage page;
  ConstPage next;
};

[[gnu::always_inline]] inline void fetch(const void* p) {
  __builtin_prefetch(p, 0, 2);
}

// dots[q][b] += codes · operand, over `chunks` vectors of two blocks of lanes; operand rows are `stride` bytes apart.
template <class S, int bits, int NR>
[[gnu::always_inline]] inline void packed_dots(const std::uint8_t* codes, std::int64_t block_bytes, std::int64_t ahead,
                                               int chunks, const void* operand, int stride,
                                               typename S::I (&dots)[NR][2]) {
  const auto* bytes = static_cast<const std::uint8_t*>(operand);
  for (int c = 0; c < chunks; ++c) {
    const auto* at = codes + c * kVectorBytes;
    const auto first = S::load_int(at), second = S::load_int(at + block_bytes);
    fetch(at + ahead);
    fetch(at + ahead + block_bytes);
    const auto* quads = bytes + c * chunk_of(bits);
    unrolled<planes_of(bits)>([&](auto f) __attribute__((always_inline)) {
      const auto low = S::template plane<bits, f>(first), high = S::template plane<bits, f>(second);
      unrolled<NR>([&](auto r) __attribute__((always_inline)) {
        const auto quad = S::broadcast_quad(quads + r * stride + kQuad * f);
        dots[r][0] = S::dot(dots[r][0], low, quad);
        dots[r][1] = S::dot(dots[r][1], high, quad);
      });
    });
  }
}

// Scores [NR, Π] of rows r0.. with a page.
template <class S, int bits, int NR>
void packed_scores(const Format& fmt, const PackedPage& at, const Query& query, int r0, float* scores) {
  using I = typename S::I;
  const int d = fmt.head_dim, groups = fmt.k_groups(), pi = fmt.page_tokens;
  const int chunks = fmt.k_partition / chunk_of(bits);
  const std::int64_t block_bytes = std::int64_t(d) * 2 * bits, ahead = at.next.k_codes - at.page.k_codes;
  for (int t = 0; t < pi; t += 2 * kLanes) {
    typename S::F score[NR][2];
    unrolled<NR>([&](auto r) { score[r][0] = score[r][1] = S::zero(); });
    for (int g = 0; g < groups; ++g) {
      I dots[NR][2];
      unrolled<NR>([&](auto r) { dots[r][0] = dots[r][1] = S::zero_int(); });
      const auto* codes = at.page.k_codes + t / kLanes * block_bytes + g * chunks * kVectorBytes;
      packed_dots<S, bits, NR>(codes, block_bytes, ahead, chunks, query.codes + r0 * d + g * fmt.k_partition, d, dots);
      unrolled<2>([&](auto b) __attribute__((always_inline)) {
        const auto k_scale = S::load_half(at.page.k_scale + g * pi + t + b * kLanes);
        const auto k_min = S::load_half(at.page.k_min + g * pi + t + b * kLanes);
        unrolled<NR>([&](auto r) __attribute__((always_inline)) {
          const int q = (r0 + r) * groups + g;
          score[r][b] = add_score<S>(score[r][b], S::to_float(dots[r][b]), k_scale, k_min, S::splat(query.scale[q]),
                                     S::splat(query.sums[q]));
        });
      });
    }
    unrolled<NR>([&](auto r) {
      S::store(scores + r * pi + t, score[r][0]);
      S::store(scores + r * pi + t + kLanes, score[r][1]);
    });
  }
}

// P·V of rows r0.. with a page, into the state.
template <class S, int bits, int NR>
void packed_values(const Format& fmt, const PackedPage& at, const std::uint8_t* p, const RowMerge* merges, float* out) {
  using I = typename S::I;
  const int chunks = fmt.page_tokens / chunk_of(bits);
  const std::int64_t block_bytes = std::int64_t(chunks) * kVectorBytes, ahead = at.next.v_codes - at.page.v_codes;
  for (int d = 0; d < fmt.head_dim; d += 2 * kLanes) {
    I dots[NR][2];
    unrolled<NR>([&](auto r) { dots[r][0] = dots[r][1] = S::zero_int(); });
    packed_dots<S, bits, NR>(at.page.v_codes + d / kLanes * block_bytes, block_bytes, ahead, chunks, p, fmt.page_tokens,
                             dots);
    unrolled<2>([&](auto b) __attribute__((always_inline)) {
      const int channel = d + b * kLanes;
      const auto v_scale = S::load_half(at.page.v_scale + channel), v_min = S::load_half(at.page.v_min + channel);
      unrolled<NR>([&](auto r) __attribute__((always_inline)) {
        add_values<S>(out + r * fmt.head_dim + channel, S::to_float(dots[r][b]), v_scale, v_min, merges[r]);
      });
    });
  }
}

template <class S, int NR>
void packed_rows(const Format& fmt, const PackedPage& at, const Query& query, int r0, State& state, float* scores,
                 std::uint8_t* codes) {
  PageWeights weights[NR];
  RowMerge merges[NR];
  if (fmt.k_bits == 2) {
    packed_scores<S, 2, NR>(fmt, at, query, r0, scores);
  } else {
    packed_scores<S, 4, NR>(fmt, at, query, r0, scores);
  }
  const int pi = fmt.page_tokens;
  for (int r = 0; r < NR; ++r) weights[r] = weigh_symmetric<S>(scores + r * pi, pi, codes + r * pi);
  merge_weights<S>(fmt, state, r0, NR, weights, merges);
  float* out = state.out + std::size_t(r0) * fmt.head_dim;
  if (fmt.v_bits == 2) {
    packed_values<S, 2, NR>(fmt, at, codes, merges, out);
  } else {
    packed_values<S, 4, NR>(fmt, at, codes, merges, out);
  }
}

// Every row of the query takes the page.
template <class S>
void attend_packed(const Format& fmt, const PackedPage& at, const Query& query, State& state, Arena<S> arena) {
  float* scores = arena.template take<float>(kTile * fmt.page_tokens);
  auto* codes = arena.template take<std::uint8_t>(kTile * fmt.page_tokens);
  constexpr int kHalvesPerLine = 32;
  for (std::size_t i = 0; i < fmt.k_meta(); i += kHalvesPerLine) {
    fetch(at.next.k_scale + i);
    fetch(at.next.k_min + i);
  }
  for (std::size_t i = 0; i < fmt.v_meta(); i += kHalvesPerLine) {
    fetch(at.next.v_scale + i);
    fetch(at.next.v_min + i);
  }
  for (int r = 0; r < query.rows; r += kTile) {
    switch (query.rows - r) {
      case 1: packed_rows<S, 1>(fmt, at, query, r, state, scores, codes); break;
      case 2: packed_rows<S, 2>(fmt, at, query, r, state, scores, codes); break;
      case 3: packed_rows<S, 3>(fmt, at, query, r, state, scores, codes); break;
      default: packed_rows<S, 4>(fmt, at, query, r, state, scores, codes); break;
    }
  }
}

}  // namespace hack
