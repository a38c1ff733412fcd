// Peak rates of memory and of the vector units, which benchmarks print beside their results.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tables.h"

namespace hack {

// Reads `count` words, a multiple of 2^17, on `threads` threads; returns something that depends on all of them.
std::uint64_t read_all(const std::uint64_t* words, std::size_t count, int threads);

void dots_on_all(Dots* dots, std::int64_t rounds, int threads);

}  // namespace hack
