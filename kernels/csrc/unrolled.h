// Loops with compile-time counts, so that the compiler keeps arrays of accumulators in registers.
#pragma once

#include <utility>

#include "page_format.h"

namespace hack {

// use(0), .. use(n - 1) with compile-time indices.
template <int n, class Use>
[[gnu::always_inline]] inline void unrolled(Use use) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (use(std::integral_constant<int, i>{}), ...);
  }
  (std::make_integer_sequence<int, n>{});
}

// use(n) with n, one of 1 .. most, as a compile-time constant.
template <int most, class Use>
[[gnu::always_inline]] inline void with_constant(int n, Use use) {
  if constexpr (most > 1) {
    if (n < most) return with_constant<most - 1>(n, use);
  }
  use(std::integral_constant<int, most>{});
}

// tile(t, NB) for NB blocks of lanes from lane t on, as many at a time as registers allow; `least` divides all blocks.
template <class S, int least = 2, class Tile>
[[gnu::always_inline]] inline void each_block(int lanes, Tile tile) {
  constexpr int NB = S::kTileBlocks;
  int t = 0;
  for (; t + NB * kLanes <= lanes; t += NB * kLanes) tile(t, std::integral_constant<int, NB>{});
  for (; t + 2 * kLanes <= lanes; t += 2 * kLanes) tile(t, std::integral_constant<int, 2>{});
  if constexpr (least == 1) {
    if (t < lanes) tile(t, std::integral_constant<int, 1>{});
  }
}

// Prefetches into the second-level cache.
[[gnu::always_inline]] inline void fetch(const void* p) {
  __builtin_prefetch(p, 0, 2);
}

}  // namespace hack
