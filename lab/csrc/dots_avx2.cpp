#include "dots.h"
#include "simd/avx2.h"

std::uint32_t hack::dots_avx2(std::int64_t rounds) {
  return dots<Avx2>(rounds);
}
