// Rivals of homomorphic attention, equally tuned: the same items, threads, splits, merges, vectors without horizontal
// sums, and exact own page. AVX-512 BF16 only; for benchmarks.
//
//   bf16        pages of BF16 rows in the order of bf16.h, in the place of FP16 rows (Kind::kRows)
//   dequantize  pages of codes at 2 bits (Kind::kHack), each code turned into its FP32 value and multiplied
//
// Both need page_tokens and head_dim that are multiples of 64.
#pragma once

#include "bf16.h"
#include "hack_format.h"

namespace hack {

inline void attend_bf16(const PageFormat& fmt, const Pool& pool, const AttendItem& item, std::byte* scratch) {
  Arena<V512> arena(scratch);
  const Query query = make_query<V512>(fmt, item, arena);
  State state = make_state<V512>(fmt, query.rows, arena);
  auto* q = arena.take<std::uint16_t>(std::size_t(query.rows) * fmt.head_dim);
  auto* p = arena.take<std::uint16_t>(kTile * fmt.page_tokens);
  float* scores = arena.take<float>(kTile * fmt.page_tokens);
  narrow(query.exact, query.rows * fmt.head_dim, q);
  const auto at = [&](std::int64_t i) { return (item.page_ids[i] * pool.heads + item.head) * fmt.elements(); };
  const auto* k = reinterpret_cast<const std::uint16_t*>(pool.planes.at[0]);
  const auto* v = reinterpret_cast<const std::uint16_t*>(pool.planes.at[1]);
  for (std::int64_t i = item.first; i < item.last; ++i) {
    const std::int64_t elements_ahead = i + 1 < item.last ? std::int64_t(at(i + 1)) - std::int64_t(at(i)) : 0;
    const Bf16Page page{k + at(i), v + at(i), query.rows <= kTile ? 2 * elements_ahead : 0};
    each_tile(query.rows, [&](auto rows, int r) { bf16_tile<rows>(fmt, page, q, r, state, scores, p); });
  }
  if (item.own.total > 0) attend_own_exactly<V512>(fmt, item, query, state, arena);
  write_state<V512>(fmt, item, query.rows, state);
}

// The 16 codes in bits `shift`.. of every lane, as FP32: a permutation looks them up, for it reads only the low bits.
template <int shift>
[[gnu::always_inline]] inline __m512 code_values(__m512i packed) {
  const __m512 values = _mm512_set_ps(3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0);
  return _mm512_permutexvar_ps(shift == 0 ? packed : _mm512_srli_epi32(packed, shift), values);
}

// sums[r] += x^ · rows over one vector of 16 lanes by 16 elements, x^ = scale * code + minimum.
template <int NR>
[[gnu::always_inline]] inline void dequantized_dots(__m512i packed, __m512 scale, __m512 minimum, const float* rows,
                                                    int stride, __m512 (&sums)[NR]) {
  unrolled<16>([&](auto e) __attribute__((always_inline)) {  // element 4f + i lies in byte i, plane f
    constexpr int shift = 8 * (e % kQuad) + 2 * (e / kQuad);
    const __m512 x = _mm512_fmadd_ps(code_values<shift>(packed), scale, minimum);
    unrolled<NR>([&](auto r) __attribute__((always_inline)) {
      sums[r] = _mm512_fmadd_ps(x, _mm512_set1_ps(rows[r * stride + e]), sums[r]);
    });
  });
}

// A page, and the next page, which is prefetched.
struct PackedPage {
  ConstHackPage page;
  ConstHackPage next;
};

template <int NR>
void dequantize_tile(const HackFormat& fmt, const PackedPage& at, const float* q, int r0, State& state, float* scores) {
  const int pi = fmt.page_tokens, d = fmt.head_dim, z = fmt.k_partition;
  const std::uint8_t* codes = at.page.k_codes;
  const std::int64_t k_ahead = at.next.k_codes - at.page.k_codes, v_ahead = at.next.v_codes - at.page.v_codes;
  for (int t = 0; t < pi; t += kLanes) {
    __m512 sums[NR];
    unrolled<NR>([&](auto r) { sums[r] = _mm512_setzero_ps(); });
    for (int c = 0; c < d; c += 16, codes += kVectorBytes) {
      const int meta = c / z * pi + t;
      fetch(codes + k_ahead);
      dequantized_dots<NR>(_mm512_loadu_si512(codes), V512::load_half(at.page.k_scale + meta),
                           V512::load_half(at.page.k_min + meta), q + r0 * d + c, d, sums);
    }
    unrolled<NR>([&](auto r) { _mm512_storeu_ps(scores + r * pi + t, sums[r]); });
  }
  weigh_rows<V512, NR>(fmt, state, r0, scores);
  codes = at.page.v_codes;
  for (int c = 0; c < d; c += kLanes) {
    __m512 sums[NR];
    float* out = state.out + std::size_t(r0) * d + c;
    unrolled<NR>([&](auto r) { sums[r] = _mm512_loadu_ps(out + r * d); });
    const __m512 scale = V512::load_half(at.page.v_scale + c), minimum = V512::load_half(at.page.v_min + c);
    for (int t = 0; t < pi; t += 16, codes += kVectorBytes) {
      fetch(codes + v_ahead);
      dequantized_dots<NR>(_mm512_loadu_si512(codes), scale, minimum, scores + t, pi, sums);
    }
    unrolled<NR>([&](auto r) { _mm512_storeu_ps(out + r * d, sums[r]); });
  }
}

inline void attend_dequantizing(const PageFormat& format, const Pool& pool, const AttendItem& item,
                                std::byte* scratch) {
  const HackFormat& fmt = as_hack(format);
  Arena<V512> arena(scratch);
  const Query query = make_query<V512>(fmt, item, arena);
  State state = make_state<V512>(fmt, query.rows, arena);
  float* scores = arena.take<float>(kTile * fmt.page_tokens);
  const auto page_of = [&](std::int64_t id) { return hack_page<ConstHackPage>(pool.page(fmt, id, item.head)); };
  for (std::int64_t i = item.first; i < item.last; ++i) {
    const std::int64_t next = item.page_ids[i + 1 < item.last ? i + 1 : i];
    const PackedPage at{page_of(item.page_ids[i]), page_of(next)};
    each_tile(query.rows, [&](auto rows, int r) { dequantize_tile<rows>(fmt, at, query.exact, r, state, scores); });
  }
  if (item.own.total > 0) attend_own_exactly<V512>(fmt, item, query, state, arena);
  write_state<V512>(fmt, item, query.rows, state);
}

}  // namespace hack
