#include "machine_limits.h"

#include <atomic>

#include "thread_pool.h"

namespace hack {

std::uint64_t read_all(const std::uint64_t* words, std::size_t count, int threads) {
  constexpr std::size_t kSlice = std::size_t{1} << 17;  // a MiB
  std::atomic<std::uint64_t> folded{0};
  parallel_for(threads, std::int64_t(count / kSlice), [&](std::int64_t i) {
    const std::uint64_t* slice = words + std::size_t(i) * kSlice;
    std::uint64_t sums[16] = {};
    for (std::size_t j = 0; j < kSlice; j += 16)
      for (std::size_t lane = 0; lane < 16; ++lane) sums[lane] ^= slice[j + lane];
    std::uint64_t sum = 0;
    for (const std::uint64_t lane : sums) sum ^= lane;
    folded.fetch_xor(sum, std::memory_order_relaxed);
  });
  return folded.load();
}

void dots_on_all(Dots* dots, std::int64_t rounds, int threads) {
  std::atomic<std::uint32_t> sum{0};
  parallel_for(threads, threads, [&](std::int64_t) { sum.fetch_add(dots(rounds), std::memory_order_relaxed); });
}

}  // namespace hack
