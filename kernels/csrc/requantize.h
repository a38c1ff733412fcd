// Ablation HACK/RQE: appends rows to a page of codes. K rows are quantized by themselves. V's codes are dequantized to
// FP16 rows and quantized anew together with the new rows. The definition is `requantize` in reference/hack.py.
#pragma once

#include "layout.h"
#include "quantize.h"

namespace hack {

// The first `n` rows of a page's V, rounded up to whole vectors of codes: FP16 [n, D].
template <class S, int bits>
void dequantize_v(const HackFormat& fmt, const HackPage& page, int n, std::uint16_t* rows) {
  constexpr int kChunk = chunk_of(bits);
  for (int d = 0; d < fmt.head_dim; d += kLanes) {
    const auto scale = S::load_half(page.v_scale + d), minimum = S::load_half(page.v_min + d);
    const std::uint8_t* packed = page.v_codes + std::size_t(d) * fmt.page_tokens * bits / 8;
    for (int t = 0; t < n; t += kChunk, packed += kVectorBytes) {
      const auto codes = S::load_int(packed);
      unrolled<planes_of(bits)>([&](auto f) __attribute__((always_inline)) {
        const auto quad = S::template plane<bits, f>(codes);
        unrolled<kQuad>([&](auto i) __attribute__((always_inline)) {
          const auto code = S::dot(S::zero_int(), quad, S::splat_int(1 << (8 * i)));  // the lanes' byte i
          const auto value = S::fma(S::to_float(code), scale, minimum);               // the product is exact
          S::store_half(rows + (t + kQuad * f + i) * fmt.head_dim + d, S::min(value, S::splat(kMaxHalf)));
        });
      });
    }
  }
}

// Writes codes [Π - old, D] and metadata [Π - old, G] of the rows of K from `old` on. Rows past the new ones become 0.
template <class S>
void append_k(const HackFormat& fmt, Place place, const NewRows& rows, const HackPage& page, Arena<S> arena) {
  const int d = fmt.head_dim, groups = fmt.k_groups(), end = fmt.page_tokens - rows.old;
  const RowCodes k = take_codes(fmt, fmt.k_meta(), arena);
  const std::uint16_t* pointers[kMaxPageTokens];
  for (int t = 0; t < rows.count; ++t) pointers[t] = rows.k + t * rows.stride;
  quantize_k<S>(fmt, {place.layer, place.head, place.position + rows.old}, pointers, rows.count, k);
  std::memset(k.codes + rows.count * d, 0, std::size_t(end - rows.count) * d);
  with_width<S>(fmt.k_bits, [&](auto width) { width.pack_k_from(fmt, rows.old, k.codes, page.k_codes); });
  auto* halves = arena.template take<std::uint16_t>(fmt.k_meta() + kLanes);
  const auto store = [&](float* meta, std::uint16_t* plane) {
    std::memset(meta + rows.count * groups, 0, sizeof(float) * (end - rows.count) * groups);
    for (int i = 0; i < end * groups; i += kLanes) S::store_half(halves + i, S::load(meta + i));
    for (int t = 0; t < end; ++t)
      for (int g = 0; g < groups; ++g) plane[g * fmt.page_tokens + rows.old + t] = halves[t * groups + g];
  };
  store(k.minimum, page.k_min);
  store(k.scale, page.k_scale);
  if (fmt.sums_at_rest()) count_k_sums<S>(fmt, rows.old, k.codes, page);
}

template <class S>
void append_v(const HackFormat& fmt, Place place, const NewRows& rows, const HackPage& page, Arena<S> arena) {
  const int d = fmt.head_dim, total = rows.old + rows.count;
  const RowCodes v = take_codes(fmt, fmt.v_meta(), arena);
  auto* kept = arena.template take<std::uint16_t>(fmt.elements());
  with_width<S>(fmt.v_bits, [&](auto width) { width.dequantize_v(fmt, page, rows.old, kept); });
  const std::uint16_t* pointers[kMaxPageTokens];
  for (int t = 0; t < total; ++t) pointers[t] = t < rows.old ? kept + t * d : rows.v + (t - rows.old) * rows.stride;
  quantize_v<S>(fmt, place, pointers, total, v);
  std::memset(v.codes + total * d, 0, std::size_t(fmt.page_tokens - total) * d);
  with_width<S>(fmt.v_bits, [&](auto width) { width.pack_v(fmt, v.codes, page.v_codes); });
  store_v_meta<S>(fmt, v, page);
  if (fmt.sums_at_rest()) count_v_sums<S>(fmt, v.codes, page);
}

template <class S>
void requantize_codes(const PageFormat& format, Place place, const NewRows& rows, const Planes& planes,
                      std::byte* scratch) {
  const HackFormat& fmt = as_hack(format);
  const auto page = hack_page<HackPage>(planes);
  const Arena<S> arena(scratch);
  append_k<S>(fmt, place, rows, page, arena);
  append_v<S>(fmt, place, rows, page, arena);
}

}  // namespace hack
