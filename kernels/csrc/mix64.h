// A checksum that a GPU computes as fast as it reads: the words of some bytes, each mixed with its place and a seed,
// summed. Sums have no order, so any number of threads may share the work. hack_kernels/mix64.py defines it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace hack {

// The finalizer of MurmurHash3 (Austin Appleby, public domain): every bit of the input changes half of the output's.
inline std::uint64_t fmix64(std::uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdULL;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ x >> 33;
}

inline std::uint64_t mix64(const std::uint8_t* data, std::size_t bytes, std::uint64_t seed) {
  constexpr std::uint64_t kPhi = 0x9e3779b97f4a7c15ULL;
  const std::size_t whole = bytes / 8;
  std::uint64_t sum = bytes, word;
  for (std::size_t place = 0; place < whole; ++place) {
    std::memcpy(&word, data + place * 8, 8);
    sum += fmix64(word ^ place * kPhi ^ seed);
  }
  if (bytes % 8 == 0) return sum;
  word = 0;  // the last one ends with zeros
  std::memcpy(&word, data + whole * 8, bytes % 8);
  return sum + fmix64(word ^ whole * kPhi ^ seed);
}

}  // namespace hack
