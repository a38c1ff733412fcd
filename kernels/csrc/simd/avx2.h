// 16 lanes as two halves on AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../widths.h"
#include "avx2_products.h"

namespace hack {

struct Avx2 {
  using Products = Avx2Products;
  static constexpr const char* name = "avx2";
  static constexpr int kTileRows = 2;    // accumulators of an integer product: rows of Q or P
  static constexpr int kTileBlocks = 2;  // times vectors of codes
  static constexpr int kProductRows = 4;     // accumulators of a product in FP32: rows of x
  static constexpr int kProductOutputs = 3;  // times rows of a weight
  static constexpr int kProductOutputsOfOneRow = 8;
  static constexpr int kTurnRows = 4;     // accumulators of a rotation of heads: rows of x
  static constexpr int kTurnVectors = 1;  // times vectors of outputs
  static constexpr int kTurnVectorsOfOneRow = 4;
  static constexpr int kProductCache = 1 << 14;  // bytes of x that stay in the first-level cache during a product
  static constexpr bool kMultipliesWords = true;  // products with codes of a weight: block_words.h, block_digits.h
  static constexpr int kBlockRows = 4;            // accumulators of such a product: up to 4 rows of x
  template <int rows>
  static constexpr int kBlockTiles = rows == 1 ? 2 : 1;  // times tiles of 16 rows of a weight
  struct F {
    __m256 a, b;
  };
  struct I {
    __m256i a, b;
  };
  using W = I;
  using B = __m128i;
  static constexpr bool kDotTakesBytes = false;  // codes of more than kNarrow bits need a `dot` of their own

  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static F load_half(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
  }
  static F load_bfloat(const std::uint16_t* p) {
    const __m256i words = _mm256_loadu_si256((const __m256i*)p);
    const auto wide = [](__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); };
    return {wide(_mm256_castsi256_si128(words)), wide(_mm256_extracti128_si256(words, 1))};
  }
  static void store_half(std::uint16_t* p, F x) { store_half_rounded<_MM_FROUND_TO_NEAREST_INT>(p, x); }
  static void store_half_up(std::uint16_t* p, F x) { store_half_rounded<_MM_FROUND_TO_POS_INF>(p, x); }
  static void store_bfloat(std::uint16_t* p, F x) {
    const auto rounded = [](__m256 lanes) {
      const __m256i bits = _mm256_castps_si256(lanes), one = _mm256_set1_epi32(1);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
      const __m256i nearest = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
      const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
      const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(lanes, lanes, _CMP_UNORD_Q));
      return _mm256_srli_epi32(_mm256_blendv_epi8(nearest, quiet, nan), 16);
    };
    const __m256i words = _mm256_packus_epi32(rounded(x.a), rounded(x.b));  // in turns of 4
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(words, 0xD8));
  }
  static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  static F fused(F x, F y, F z) { return fma(x, y, z); }  // rounds once on every instruction set
  static F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static F floor(F x) { return rounded<_MM_FROUND_TO_NEG_INF>(x); }
  static F above_floor(F x) { return sub(x, floor(x)); }
  static F scale_by_floor(F x, F n) { return {times_power(x.a, floor(n).a), times_power(x.b, floor(n).b)}; }
  static float reduce_max(F x) {
    return fold(_mm256_max_ps(x.a, x.b), [](__m128 p, __m128 q) { return _mm_max_ps(p, q); });
  }
  static float reduce_min(F x) {
    return fold(_mm256_min_ps(x.a, x.b), [](__m128 p, __m128 q) { return _mm_min_ps(p, q); });
  }
  static float reduce_add(F x) {
    return fold(_mm256_add_ps(x.a, x.b), [](__m128 p, __m128 q) { return _mm_add_ps(p, q); });
  }
  // out[i] = maximum or sum of the lanes of rows[i].
  static void fold_max(const F (&rows)[4], float* out) {
    fold(rows, out, [](__m128 p, __m128 q) { return _mm_max_ps(p, q); });
  }
  static void fold_add(const F (&rows)[4], float* out) {
    fold(rows, out, [](__m128 p, __m128 q) { return _mm_add_ps(p, q); });
  }
  // 16 vectors of 16 lanes: lane i of vector j goes to lane j of vector i.
  static void transpose(F (&x)[16]) {
    __m256 block[4][8];
    for (int i = 0; i < 8; ++i) {
      block[0][i] = x[i].a;
      block[1][i] = x[8 + i].a;
      block[2][i] = x[i].b;
      block[3][i] = x[8 + i].b;
    }
    for (auto& each : block) transpose_8(each);
    for (int i = 0; i < 8; ++i) {
      x[i] = {block[0][i], block[1][i]};
      x[8 + i] = {block[2][i], block[3][i]};
    }
  }

  static I zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static I splat_int(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static I load_int(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
  }
  static void store_int(void* p, I x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)p + 1, x.b);
  }
  static I broadcast_quad(const void* p) {
    std::int32_t x;
    std::memcpy(&x, p, sizeof x);
    return splat_int(x);
  }
  static I add_int(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static I shift_left(I x, int n) {
    const __m128i count = _mm_cvtsi32_si128(n);
    return {_mm256_sll_epi32(x.a, count), _mm256_sll_epi32(x.b, count)};
  }
  static I truncate(F x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
  // The largest whole number that is not above x, for |x| < 2^22.
  static I floor_int(F x) { return truncate(floor(x)); }
  static I nearest(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
  static int reduce_add_int(I x) {
    const __m256i sum = _mm256_add_epi32(x.a, x.b);
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
  }
  static void store_low_bytes(std::uint8_t* p, I x) {
    const __m256i mask = _mm256_set1_epi32(0xFF);
    const __m256i packed = _mm256_packus_epi32(_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask));
    const __m256i words = _mm256_permute4x64_epi64(packed, 0xD8);
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(low, high));
  }
  // B is 16 bytes, a code of up to 8 bits in each.
  static B load_bytes(const std::uint8_t* p) { return _mm_loadu_si128((const __m128i*)p); }
  // The field of `width` bits that begins `shift` bits up in every byte.
  template <int width>
  static B byte_field(B x, int shift) {
    return _mm_and_si128(_mm_srl_epi16(x, _mm_cvtsi32_si128(shift)), _mm_set1_epi8((1 << width) - 1));
  }
  // `high` above the lower n bits; together they fit into a byte.
  template <int n>
  static B with_upper(B low, B high) {
    return _mm_or_si128(low, _mm_slli_epi16(high, n));
  }
  static F bytes_to_float(B x) {
    const auto half = [](__m128i y) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(y)); };
    return {half(x), half(_mm_srli_si128(x, 8))};
  }
  // Lane x[i] of the table, for codes below 16.
  static F look_up(F table, B x) {
    const auto half = [&](__m128i y) {
      const __m256i lane = _mm256_cvtepu8_epi32(y);
      const __m256 low = _mm256_permutevar8x32_ps(table.a, lane), high = _mm256_permutevar8x32_ps(table.b, lane);
      return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(lane, 28)));
    };
    return {half(x), half(_mm_srli_si128(x, 8))};
  }
  // Codes of a sign, an exponent and a mantissa, read as FP16 whose exponent has the same lowest bit.
  template <int exponent, int mantissa>
  static F small_floats(B x) {
    constexpr int bits = 1 + exponent + mantissa;
    const __m256i moved = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(x), 16 - bits), 5 - exponent);
    constexpr int kept = 0x8000 | (((1 << (bits - 1)) - 1) << (10 - mantissa));
    const __m256i halves = _mm256_and_si256(moved, _mm256_set1_epi16(std::int16_t(kept)));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  }
  template <int bits, int f>
  static I plane(I x) {
    const __m256i mask = _mm256_set1_epi8((1 << bits) - 1);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, bits * f), mask),
            _mm256_and_si256(_mm256_srli_epi16(x.b, bits * f), mask)};
  }
  // `low` plus 4 times bit f of every byte of x: a code's lower two bits and its highest.
  template <int f>
  static I with_high(I low, I x) {
    const auto half = [](__m256i bits, __m256i y) {
      const __m256i moved = f < 2 ? _mm256_slli_epi16(y, f < 2 ? 2 - f : 0) : _mm256_srli_epi16(y, f < 2 ? 0 : f - 2);
      return _mm256_or_si256(bits, _mm256_and_si256(moved, _mm256_set1_epi8(4)));
    };
    return {half(low.a, x.a), half(low.b, x.b)};
  }
  // acc + Σ of 4 products per lane, unsigned codes times signed bytes.
  template <int bits = kNarrow>
  static I dot(I acc, I codes, I signed_bytes) {
    if constexpr (bits <= kNarrow)
      return {half_dot(acc.a, codes.a, signed_bytes.a), half_dot(acc.b, codes.b, signed_bytes.b)};
    return {byte_dot(acc.a, codes.a, even(signed_bytes.a), odd(signed_bytes.a)),
            byte_dot(acc.b, codes.b, even(signed_bytes.b), odd(signed_bytes.b))};
  }
  // For products with codes of a weight (block_words.h): of every word of 16 bits, the `bits` bits from `shift` on.
  template <int bits, int shift>
  static I words(I x) {
    const __m256i mask = _mm256_set1_epi16((1 << bits) - 1);
    const auto half = [&](__m256i y) {
      if constexpr (shift + bits == 16) return _mm256_srli_epi16(y, shift);
      return _mm256_and_si256(shift == 0 ? y : _mm256_srli_epi16(y, shift), mask);
    };
    return {half(x.a), half(x.b)};
  }
  // acc + the products of two words of 16 bits per lane.
  static I word_dot(I acc, I x, I y) {
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y.b))};
  }
  // Pairs of words of 16 bits: the lower word of `low`, and above it the lower word of `high`.
  static I word_pairs(I low, I high) {
    const auto half = [](__m256i x, __m256i y) { return _mm256_blend_epi16(x, _mm256_slli_epi32(y, 16), 0xAA); };
    return {half(low.a, high.a), half(low.b, high.b)};
  }
  // Stores 16 words. Each four of them are in the order 0, 2, 1, 3.
  static void store_words(std::int16_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    _mm256_storeu_si256((__m256i*)p, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xD8), 0xD8));
  }
  // `dot` with unsigned bytes.
  template <int bits = kNarrow>
  static I dot_unsigned(I acc, I codes, I bytes) {
    if constexpr (bits <= kNarrow) return {half_dot(acc.a, bytes.a, codes.a), half_dot(acc.b, bytes.b, codes.b)};
    return {byte_dot(acc.a, codes.a, even_unsigned(bytes.a), odd_unsigned(bytes.a)),
            byte_dot(acc.b, codes.b, even_unsigned(bytes.b), odd_unsigned(bytes.b))};
  }
  // Accumulators of a product with rows in lanes: vectors of rows, times words of a page.
  static constexpr int kLaneVectors = 1;
  static constexpr int kLaneRows = 4;
  // The number of steps, each a pair of products of a code and a byte, whose sums fit 16 bits; 0: sums have 32 bits.
  template <int bits>
  static constexpr int kRunOfDots = bits <= kNarrow ? 128 >> bits : 0;
  template <int bits>
  static I run_dot(I sum, I codes, I signed_bytes) {
    if constexpr (kRunOfDots<bits> == 0) return dot<bits>(sum, codes, signed_bytes);
    return {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(codes.a, signed_bytes.a)),
            _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(codes.b, signed_bytes.b))};
  }
  static I run_total(I run, std::int16_t factor = 1) {
    const __m256i factors = _mm256_set1_epi16(factor);
    return {_mm256_madd_epi16(run.a, factors), _mm256_madd_epi16(run.b, factors)};
  }
  // Lanes of numbers in 0..127 to lanes of four bytes.
  static I quads_of(I a, I b, I c, I d) {
    const auto half = [](__m256i x, __m256i y, __m256i z, __m256i w) {
      const __m256i low = _mm256_or_si256(x, _mm256_slli_epi32(y, 8));
      return _mm256_or_si256(low, _mm256_or_si256(_mm256_slli_epi32(z, 16), _mm256_slli_epi32(w, 24)));
    };
    return {half(a.a, b.a, c.a, d.a), half(a.b, b.b, c.b, d.b)};
  }
  // W is 8 words of 32 bits, each in the lower half of 64 bits. A product fills all 64.
  static W splat_word(std::uint32_t x) { return {_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)}; }
  static W multiply(W x, std::uint32_t y) {
    const __m256i factor = _mm256_set1_epi64x(y);
    return {_mm256_mul_epu32(x.a, factor), _mm256_mul_epu32(x.b, factor)};
  }
  static W upper(W x) { return {_mm256_srli_epi64(x.a, 32), _mm256_srli_epi64(x.b, 32)}; }
  static W bit_xor(W x, W y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
  // The numbers 0..7 in the order for `shorts`: the even ones in the first half, as unpacking pairs of 128 bits needs.
  static W block_numbers() { return {_mm256_set_epi64x(6, 2, 4, 0), _mm256_set_epi64x(7, 3, 5, 1)}; }
  // Four words of each of 8 blocks -> their 16-bit halves in order, of blocks 0 and 2, 4 and 6, 1 and 3, 5 and 7.
  static void shorts(const W (&words)[4], I (&out)[4]) {
    half_shorts(words[0].a, words[1].a, words[2].a, words[3].a, out[0], out[1]);
    half_shorts(words[0].b, words[1].b, words[2].b, words[3].b, out[2], out[3]);
  }

 private:
  static void transpose_8(__m256 (&x)[8]) {
    __m256 pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
      pairs[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
      pairs[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
      quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
    }
    for (int j = 0; j < 4; ++j) {
      x[j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x20);
      x[4 + j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x31);
    }
  }
  static void half_shorts(__m256i a, __m256i b, __m256i c, __m256i d, I& first, I& second) {
    const __m256i ab = _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xAA);
    const __m256i cd = _mm256_blend_epi32(c, _mm256_slli_epi64(d, 32), 0xAA);
    first = widened(_mm256_unpacklo_epi64(ab, cd));
    second = widened(_mm256_unpackhi_epi64(ab, cd));
  }
  static I widened(__m256i shorts) {
    return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(shorts)),
            _mm256_cvtepu16_epi32(_mm256_extracti128_si256(shorts, 1))};
  }
  template <int mode>
  static void store_half_rounded(std::uint16_t* p, F x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, mode | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, mode | _MM_FROUND_NO_EXC));
  }
  template <int mode>
  static F rounded(F x) {
    return {_mm256_round_ps(x.a, mode | _MM_FROUND_NO_EXC), _mm256_round_ps(x.b, mode | _MM_FROUND_NO_EXC)};
  }
  static __m256 times_power(__m256 x, __m256 n) {  // 0 below the normal range
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    const __m256i exponent = _mm256_slli_epi32(_mm256_max_epi32(biased, _mm256_setzero_si256()), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
  }
  template <class Fold>
  static float fold(__m256 x, Fold with) {
    __m128 half = with(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = with(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(with(half, _mm_shuffle_ps(half, half, 1)));
  }
  template <class With>
  static void fold(const F (&rows)[4], float* out, With with) {
    __m128 x[4];
    for (int i = 0; i < 4; ++i) {
      const __m128 first = with(_mm256_castps256_ps128(rows[i].a), _mm256_extractf128_ps(rows[i].a, 1));
      const __m128 second = with(_mm256_castps256_ps128(rows[i].b), _mm256_extractf128_ps(rows[i].b, 1));
      x[i] = with(first, second);
    }
    const __m128 even = with(_mm_unpacklo_ps(x[0], x[2]), _mm_unpackhi_ps(x[0], x[2]));
    const __m128 odd = with(_mm_unpacklo_ps(x[1], x[3]), _mm_unpackhi_ps(x[1], x[3]));
    _mm_storeu_ps(out, with(_mm_unpacklo_ps(even, odd), _mm_unpackhi_ps(even, odd)));
  }
  // Pairs of products stay below 2^15 (at most 2 * 255 * 15), so the saturating 16-bit step is exact.
  static __m256i half_dot(__m256i acc, __m256i u, __m256i s) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
  }
  // Codes of 8 bits: products of bytes that were widened to 16 bits, the even ones and the odd ones.
  static __m256i byte_dot(__m256i acc, __m256i codes, __m256i even, __m256i odd) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(even_unsigned(codes), even));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(odd_unsigned(codes), odd));
  }
  static __m256i even_unsigned(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)); }
  static __m256i odd_unsigned(__m256i bytes) { return _mm256_srli_epi16(bytes, 8); }
  static __m256i even(__m256i bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); }
  static __m256i odd(__m256i bytes) { return _mm256_srai_epi16(bytes, 8); }
};

}  // namespace hack
