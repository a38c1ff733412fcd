// What memory and the vector units can do at best, which benchmarks print beside their own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "work.h"

namespace hack {

// Reads `count` words, a multiple of 2^17, on `threads` threads; returns something that depends on all of them.
std::uint64_t read_all(const std::uint64_t* words, std::size_t count, int threads);

// `rounds` of `operations.dots` on each of `threads` threads.
void dots_on_all(const Operations& operations, std::int64_t rounds, int threads);

}  // namespace hack
