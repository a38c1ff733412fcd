// Attention on BF16 products with FP32 sums, on AVX-512 BF16: for models in bfloat16 on pages of FP16 rows. BF16 holds
// the values of these rows exactly, except for those below FP16's normal range.
//
// A page of BF16 rows is K [Π/16][D/2][16 tokens][2 channels], V [D/16][Π/2][16 channels][2 tokens]. page_tokens and
// head_dim must be multiples of 64.
#pragma once

#include <immintrin.h>

#include "rows.h"
#include "simd/avx512.h"

namespace hack {

using V512 = Avx512;

inline void narrow(const float* in, int n, std::uint16_t* out) {
  for (int i = 0; i < n; i += kLanes) {
    const __m256bh half = _mm512_cvtneps_pbh(_mm512_loadu_ps(in + i));
    std::memcpy(out + i, &half, sizeof half);
  }
}

// sums[r][b] = Σ over pairs of NR rows of BF16 with NB blocks of 16 lanes. Data `ahead` bytes further on is prefetched.
template <int NR, int NB>
[[gnu::always_inline]] inline void pair_dots(const std::uint16_t* blocks, int pairs, std::int64_t ahead,
                                             const std::uint16_t* rows, int stride, __m512 (&sums)[NR][NB]) {
  unrolled<NR * NB>([&](auto i) { sums[i / NB][i % NB] = _mm512_setzero_ps(); });
  for (int j = 0; j < pairs; ++j) {
    __m512i vectors[NB];
    unrolled<NB>([&](auto b) {
      const auto* at = blocks + (std::size_t(b) * pairs + j) * 2 * kLanes;
      vectors[b] = _mm512_loadu_si512(at);
      if (NR <= kTile && ahead != 0) fetch(reinterpret_cast<const std::byte*>(at) + ahead);
    });
    unrolled<NR>([&](auto r) __attribute__((always_inline)) {
      const auto pair = V512::broadcast_quad(rows + r * stride + 2 * j);
      unrolled<NB>([&](auto b) __attribute__((always_inline)) {
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums[r][b]) : "v"(vectors[b]), "v"(pair));
      });
    });
  }
}

struct Bf16Page {
  const std::uint16_t* k;
  const std::uint16_t* v;
  std::int64_t ahead;  // bytes to the next page, 0 when pages are read many times
};

template <int NR>
void bf16_tile(const PageFormat& fmt, const Bf16Page& page, const std::uint16_t* q, int r0, State& state, float* scores,
               std::uint16_t* p) {
  constexpr int NB = 4;
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  __m512 sums[NR][NB];
  for (int t = 0; t < pi; t += NB * kLanes) {
    pair_dots<NR, NB>(page.k + std::size_t(t) * d, d / 2, page.ahead, q + r0 * d, d, sums);
    unrolled<NR * NB>(
        [&](auto i) { _mm512_storeu_ps(scores + i / NB * pi + t + i % NB * kLanes, sums[i / NB][i % NB]); });
  }
  weigh_rows<V512, NR>(fmt, state, r0, scores);
  narrow(scores, NR * pi, p);
  for (int c = 0; c < d; c += NB * kLanes) {
    pair_dots<NR, NB>(page.v + std::size_t(c) * pi, pi / 2, page.ahead, p, pi, sums);
    unrolled<NR * NB>([&](auto i) __attribute__((always_inline)) {
      float* out = state.out + std::size_t(r0 + i / NB) * d + c + i % NB * kLanes;
      _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), sums[i / NB][i % NB]));
    });
  }
}

// 16 FP16 values at `a` and 16 at `b` as BF16 pairs (a, b).
[[gnu::always_inline]] inline __m512i pairs_of(const std::uint16_t* a, const std::uint16_t* b) {
  const auto widened = [](__m256bh half) { return _mm512_cvtepu16_epi32((__m256i)half); };
  const __m512i first = widened(_mm512_cvtneps_pbh(V512::load_half(a)));
  const __m512i second = widened(_mm512_cvtneps_pbh(V512::load_half(b)));
  return _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
}

// A page of FP16 rows in the order of the products.
inline void order_rows(const PageFormat& fmt, const RowPage& page, std::uint16_t* k, std::uint16_t* v) {
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  for (int c = 0; c < d; c += kLanes) {
    for (int t = 0; t < pi; t += 2, v += 2 * kLanes)
      _mm512_storeu_si512(v, pairs_of(page.v + t * d + c, page.v + (t + 1) * d + c));
  }
  for (int t = 0; t < pi; ++t) {
    for (int c = 0; c < d; c += kLanes) {
      alignas(32) std::uint32_t pairs[kLanes / 2];
      const __m256bh half = _mm512_cvtneps_pbh(V512::load_half(page.k + t * d + c));
      std::memcpy(pairs, &half, sizeof pairs);
      for (int i = 0; i < kLanes / 2; ++i) {
        const std::size_t to = (std::size_t(t / kLanes) * (d / 2) + c / 2 + i) * kLanes + t % kLanes;
        std::memcpy(k + 2 * to, pairs + i, sizeof pairs[i]);
      }
    }
  }
}

inline bool takes_bf16(const PageFormat& fmt) {
  return fmt.page_tokens % 64 == 0 && fmt.head_dim % 64 == 0;
}

inline void attend_rows_in_bf16(const PageFormat& fmt, const Pool& pool, const AttendItem& item, std::byte* scratch) {
  Arena<V512> arena(scratch);
  const Query query = make_query<V512>(fmt, item, arena);
  State state = make_state<V512>(fmt, query.rows, arena);
  auto* q = arena.take<std::uint16_t>(std::size_t(query.rows) * fmt.head_dim);
  auto* p = arena.take<std::uint16_t>(kTile * fmt.page_tokens);
  float* scores = arena.take<float>(kTile * fmt.page_tokens);
  auto* k = arena.take<std::uint16_t>(fmt.elements());
  auto* v = arena.take<std::uint16_t>(fmt.elements());
  narrow(query.exact, query.rows * fmt.head_dim, q);
  for (std::int64_t i = item.first; i < item.last; ++i) {
    order_rows(fmt, row_page<V512>(fmt, pool, item.page_ids[i], item.head), k, v);
    each_tile(query.rows, [&](auto rows, int r) { bf16_tile<rows>(fmt, {k, v, 0}, q, r, state, scores, p); });
  }
  if (item.own.total > 0) attend_own_exactly<V512>(fmt, item, query, state, arena);
  write_state<V512>(fmt, item, query.rows, state);
}

}  // namespace hack
