// Columns of rows in BF16, as many as a vector of 64 bytes has.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace hack {

inline constexpr int kBfloatColumns = 32;

// Columns from `at` on of a row of n values, zeros past its end.
[[gnu::always_inline]] inline __m512i load_columns(const std::byte* row, int at, int n) {
  const std::byte* from = row + 2 * std::int64_t(at);
  if (at + kBfloatColumns <= n) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16(__mmask32((std::uint64_t(1) << (n - at)) - 1), from);
}

}  // namespace hack
