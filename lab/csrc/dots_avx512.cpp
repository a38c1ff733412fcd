#include "dots.h"
#include "simd/avx512.h"

std::uint32_t hack::dots_avx512(std::int64_t rounds) {
  return dots<Avx512>(rounds);
}
