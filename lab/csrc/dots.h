// Peak rate of the processor's integer dot products: the limit that benchmarks compare attention with.
#pragma once

#include "hack_format.h"
#include "tables.h"
#include "unrolled.h"

namespace hack {

// Independent accumulators, as many as an AVX-512 tile has; operands change, so that nothing can be computed ahead.
template <class S>
std::uint32_t dots(std::int64_t rounds) {
  constexpr int kVectors = 32;
  alignas(64) std::uint8_t bytes[(kVectors + 5) * kVectorBytes];
  for (std::size_t i = 0; i < sizeof bytes; ++i) bytes[i] = std::uint8_t(i % 4);
  typename S::I sums[kDotsPerRound];
  for (auto& sum : sums) sum = S::zero_int();
  for (std::int64_t i = 0; i < rounds; ++i) {
    const std::uint8_t* at = bytes + i % kVectors * kVectorBytes;
    typename S::I quads[4];
    unrolled<4>([&](auto r) { quads[r] = S::load_int(at + r * kVectorBytes); });
    const auto codes = S::load_int(at + 4 * kVectorBytes);
    unrolled<kDotsPerRound>([&](auto j) { sums[j] = S::dot(sums[j], codes, quads[j % 4]); });
  }
  std::uint32_t total = 0;
  for (const auto& sum : sums) total += std::uint32_t(S::reduce_add_int(sum));
  return total;
}

}  // namespace hack
