// The tables of the lab's units, one unit for each instruction set.
#pragma once

#include <cstdint>

#include "work.h"

namespace hack {

// Rivals only attend and merge. AVX-512 BF16.
const Operations& bf16_rival();
const Operations& dequantize_rival();

// `rounds` times kDotsPerRound integer dots of kVectorBytes products, all in registers and the first-level cache.
using Dots = std::uint32_t(std::int64_t rounds);
inline constexpr int kDotsPerRound = 16;
Dots dots_portable, dots_avx2, dots_avx512;

}  // namespace hack
