// 16 lanes on AVX-512 with VNNI. Every simd/*.h gives the same names; the kernels are templates over them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../widths.h"

namespace hack {

struct Avx512 {
  static constexpr const char* name = "avx512-vnni";
  static constexpr int kTileRows = 4;    // accumulators of an integer product: rows of Q or P
  static constexpr int kTileBlocks = 4;  // times vectors of codes
  using Products = Avx512;
  static constexpr int kProductLanes = kLanes;
  static constexpr int kProductRows = 4;     // accumulators of a product in FP32: rows of x
  static constexpr int kProductOutputs = 6;  // times rows of a weight
  static constexpr int kProductOutputsOfOneRow = 8;
  static constexpr int kTurnRows = 4;     // accumulators of a rotation of heads: rows of x
  static constexpr int kTurnVectors = 4;  // times vectors of outputs
  static constexpr int kTurnVectorsOfOneRow = 4;
  static constexpr int kProductCache = 1 << 30;  // the tile reads x rarely enough to leave it in the second-level cache
  static constexpr bool kMultipliesWords = false;
  static constexpr int kBlockRows = 4;  // accumulators of a product with codes of a weight: up to 4 rows of x
  template <int rows>
  static constexpr int kBlockTiles = rows == 1 ? 6 : 3;  // times tiles of 16 rows of a weight
  using F = __m512;
  using I = __m512i;
  using W = __m512i;
  using B = __m128i;
  static constexpr bool kDotTakesBytes = true;  // one `dot` serves codes of every width

  static F zero() { return _mm512_setzero_ps(); }
  static F splat(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F load_half(const std::uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  static F load_bfloat(const std::uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
  }
  static void store_half(std::uint16_t* p, F x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void store_half_up(std::uint16_t* p, F x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
  }
  static void store_bfloat(std::uint16_t* p, F x) {
    const I bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), splat_int(1));
    const I nearest = _mm512_add_epi32(_mm512_add_epi32(bits, odd), splat_int(0x7FFF));
    const I rounded = _mm512_mask_or_epi32(nearest, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, splat_int(0x400000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F fused(F a, F b, F c) { return fma(a, b, c); }  // rounds once on every instruction set
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F floor(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static F above_floor(F x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }  // x - floor(x)
  static F scale_by_floor(F x, F n) { return _mm512_scalef_ps(x, n); }  // x * 2^floor(n)
  static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
  static float reduce_min(F x) { return _mm512_reduce_min_ps(x); }
  static float reduce_add(F x) { return _mm512_reduce_add_ps(x); }
  // out[i] = maximum or sum of the lanes of rows[i], in a third of the instructions of four reductions.
  static void fold_max(const F (&rows)[4], float* out) {
    fold(rows, out, [](F a, F b) { return _mm512_max_ps(a, b); });
  }
  static void fold_add(const F (&rows)[4], float* out) {
    fold(rows, out, [](F a, F b) { return _mm512_add_ps(a, b); });
  }
  // 16 vectors of 16 lanes: lane i of vector j goes to lane j of vector i.
  static void transpose(F (&x)[16]) {
    F pairs[16], quads[16];
    for (int i = 0; i < 16; i += 2) {
      pairs[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      pairs[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    // quads[i + j], i a multiple of 4: rows i .. i + 3 of columns j, j + 4, j + 8 and j + 12.
    for (int i = 0; i < 16; i += 4) {
      quads[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
      quads[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
      quads[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
      quads[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
    }
    for (int j = 0; j < 4; ++j) {
      const F low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0x88);
      const F low_odd = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0xDD);
      const F high = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0x88);
      const F high_odd = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0xDD);
      x[j] = _mm512_shuffle_f32x4(low, high, 0x88);
      x[4 + j] = _mm512_shuffle_f32x4(low_odd, high_odd, 0x88);
      x[8 + j] = _mm512_shuffle_f32x4(low, high, 0xDD);
      x[12 + j] = _mm512_shuffle_f32x4(low_odd, high_odd, 0xDD);
    }
  }

  static I zero_int() { return _mm512_setzero_si512(); }
  static I splat_int(std::int32_t x) { return _mm512_set1_epi32(x); }
  static I load_int(const void* p) { return _mm512_loadu_si512(p); }
  static void store_int(void* p, I x) { _mm512_storeu_si512(p, x); }
  static I broadcast_quad(const void* p) {
    std::int32_t x;
    std::memcpy(&x, p, sizeof x);
    return _mm512_set1_epi32(x);
  }
  static I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  static I shift_left(I x, int n) { return _mm512_sll_epi32(x, _mm_cvtsi32_si128(n)); }
  static I truncate(F x) { return _mm512_cvttps_epi32(x); }
  // The largest whole number that is not above x, for |x| < 2^22.
  static I floor_int(F x) { return _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static I nearest(F x) { return _mm512_cvtps_epi32(x); }
  static int reduce_add_int(I x) { return _mm512_reduce_add_epi32(x); }
  static void store_low_bytes(std::uint8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
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
  static F bytes_to_float(B x) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(x)); }
  // Lane x[i] of the table, for codes below 16.
  static F look_up(F table, B x) { return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(x), table); }
  // Codes of a sign, an exponent and a mantissa, read as FP16 whose exponent has the same lowest bit.
  template <int exponent, int mantissa>
  static F small_floats(B x) {
    constexpr int bits = 1 + exponent + mantissa;
    const __m256i moved = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(x), 16 - bits), 5 - exponent);
    constexpr int kept = 0x8000 | (((1 << (bits - 1)) - 1) << (10 - mantissa));
    const __m256i halves = _mm256_and_si256(moved, _mm256_set1_epi16(std::int16_t(kept)));
    return _mm512_cvtph_ps(halves);
  }
  // Field f of every byte: the codes of one plane.
  template <int bits, int f>
  static I plane(I x) {
    const I mask = _mm512_set1_epi8((1 << bits) - 1);
    if constexpr (f == 0) return _mm512_and_si512(x, mask);
    return _mm512_and_si512(_mm512_srli_epi16(x, bits * f), mask);
  }
  // `low` plus 4 times bit f of every byte of x: a code's lower two bits and its highest.
  template <int f>
  static I with_high(I low, I x) {
    const I moved = f < 2 ? _mm512_slli_epi16(x, f < 2 ? 2 - f : 0) : _mm512_srli_epi16(x, f < 2 ? 0 : f - 2);
    return _mm512_ternarylogic_epi64(low, moved, _mm512_set1_epi8(4), 0xF8);  // low | (moved & 4)
  }
  // acc + Σ of 4 products per lane, unsigned codes times signed bytes. In assembly, because GCC copies the intrinsic's
  // accumulator before and after every use, which costs as much as the products.
  template <int bits = kNarrow>
  static I dot(I acc, I codes, I signed_bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(signed_bytes));
    return acc;
  }
  // `dot` with unsigned bytes. Codes of 8 bits are read as signed, 256 less where the top bit is set; the second
  // product adds that again.
  template <int bits = kNarrow>
  static I dot_unsigned(I acc, I codes, I bytes) {
    acc = dot(acc, bytes, codes);
    if constexpr (bits <= kNarrow) return acc;
    return add_int(acc, _mm512_slli_epi32(dot(zero_int(), bytes, plane<1, 7>(codes)), 8));
  }
  // acc + the products of two words of 16 bits per lane.
  static I word_dot(I acc, I x, I y) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(y));
    return acc;
  }
  // Pairs of words of 16 bits: the lower word of `low`, and above it the lower word of `high`.
  static I word_pairs(I low, I high) { return _mm512_mask_mov_epi16(low, 0xAAAAAAAA, _mm512_slli_epi32(high, 16)); }
  // Accumulators of a product with rows in lanes: vectors of rows, times words of a page.
  static constexpr int kLaneVectors = 4;
  static constexpr int kLaneRows = 4;
  template <int bits>
  static constexpr int kRunOfDots = 0;  // sums of 32 bits hold any number of products
  template <int bits>
  static I run_dot(I sum, I codes, I signed_bytes) {
    return dot(sum, codes, signed_bytes);
  }
  static I run_total(I run) { return run; }
  // A sum below 2^22 in size that began at kSumStart is the mantissa of a float. So one operation makes it a float and
  // multiplies it by `factor`, and rounds once.
  static constexpr std::int32_t kSumStart = 0x4B400000;
  static constexpr float kFloatStart = 0x1.8p23f;  // has the bits kSumStart
  static F whole_sum(I sum) { return sub(_mm512_castsi512_ps(sum), splat(kFloatStart)); }
  static F scaled_sum(I sum, float factor) {
    return fma(_mm512_castsi512_ps(sum), splat(factor), splat(-kFloatStart * factor));
  }
  // Lanes of numbers in 0..127 to lanes of four bytes.
  static I quads_of(I a, I b, I c, I d) {
    const I shorts = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
    return _mm512_shuffle_epi8(shorts, _mm512_set4_epi32(0x0F0B0703, 0x0E0A0602, 0x0D090501, 0x0C080400));
  }
  // W is 8 words of 32 bits, each in the lower half of 64 bits. A product fills all 64.
  static W splat_word(std::uint32_t x) { return _mm512_set1_epi64(x); }
  static W multiply(W x, std::uint32_t y) { return _mm512_mul_epu32(x, _mm512_set1_epi64(y)); }
  static W upper(W x) { return _mm512_srli_epi64(x, 32); }
  static W bit_xor(W x, W y) { return _mm512_xor_si512(x, y); }
  // The numbers 0..7 in the order for `shorts`: the even ones in the first half, as unpacking pairs of 128 bits needs.
  static W block_numbers() { return _mm512_set_epi64(7, 3, 5, 1, 6, 2, 4, 0); }
  // Four words of each of 8 blocks -> their 16-bit halves in order, of blocks 0 and 2, 4 and 6, 1 and 3, 5 and 7.
  static void shorts(const W (&words)[4], I (&out)[4]) {
    const W first = _mm512_mask_shuffle_epi32(words[0], 0xAAAA, words[1], _MM_PERM_CCAA);
    const W last = _mm512_mask_shuffle_epi32(words[2], 0xAAAA, words[3], _MM_PERM_CCAA);
    const W low = _mm512_unpacklo_epi64(first, last), high = _mm512_unpackhi_epi64(first, last);
    out[0] = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(low));
    out[1] = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(high));
    out[2] = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(low, 1));
    out[3] = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1));
  }

 private:
  template <class With>
  static void fold(const F (&rows)[4], float* out, With with) {
    const F even = with(_mm512_unpacklo_ps(rows[0], rows[2]), _mm512_unpackhi_ps(rows[0], rows[2]));
    const F odd = with(_mm512_unpacklo_ps(rows[1], rows[3]), _mm512_unpackhi_ps(rows[1], rows[3]));
    F all = with(_mm512_unpacklo_ps(even, odd), _mm512_unpackhi_ps(even, odd));
    all = with(all, _mm512_shuffle_f32x4(all, all, 0x4E));
    all = with(all, _mm512_shuffle_f32x4(all, all, 0xB1));
    _mm_storeu_ps(out, _mm512_castps512_ps128(all));
  }
};

}  // namespace hack
