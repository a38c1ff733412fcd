// The lanes of a product in FP32 on AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace hack {

// The 8 lanes of a product in FP32: twice as many accumulators fit into registers.
struct Avx2Products {
  static constexpr int kProductLanes = 8;
  using F = __m256;

  static F zero() { return _mm256_setzero_ps(); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load_half(const std::uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  static F load_bfloat(const std::uint16_t* p) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  }
  static F fma(F x, F y, F z) { return _mm256_fmadd_ps(x, y, z); }
  static void fold_add(const F (&rows)[4], float* out) {
    const F even = _mm256_add_ps(_mm256_unpacklo_ps(rows[0], rows[2]), _mm256_unpackhi_ps(rows[0], rows[2]));
    const F odd = _mm256_add_ps(_mm256_unpacklo_ps(rows[1], rows[3]), _mm256_unpackhi_ps(rows[1], rows[3]));
    const F all = _mm256_add_ps(_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }
};

}  // namespace hack
