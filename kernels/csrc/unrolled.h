// Loops that must be unrolled before the compiler assigns registers: their arrays of accumulators then live in them.
#pragma once

#include <utility>

namespace hack {

// use(0), .. use(n - 1) with compile-time indices.
template <int n, class Use>
[[gnu::always_inline]] inline void unrolled(Use use) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (use(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, n>{});
}

}  // namespace hack
