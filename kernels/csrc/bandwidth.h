// The machine's read bandwidth, which benchmarks print beside their own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hack {

// Reads `count` words, a multiple of 2^17, on `threads` threads; returns something that depends on all of them.
std::uint64_t read_all(const std::uint64_t* words, std::size_t count, int threads);

}  // namespace hack
