#include "dots.h"
#include "simd/portable.h"

std::uint32_t hack::dots_portable(std::int64_t rounds) {
  return dots<Portable>(rounds);
}
