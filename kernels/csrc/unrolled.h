// Counts that the compiler must know before it assigns registers, so that arrays of accumulators live in them.
#pragma once

#include <utility>

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

}  // namespace hack
