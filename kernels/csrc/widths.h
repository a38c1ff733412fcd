// The widths of codes, and a list of numbers of which code is compiled for each.
#pragma once

#include <cstdint>
#include <type_traits>

namespace hack {

inline constexpr int kNarrow = 4;  // bits up to which sums of two products of a code and a byte fit 16 bits

// use(n) with a number of a list as a compile-time constant. The last of the list serves every other number: who makes a
// format refuses those.
template <int... list>
struct OneOf {
  static constexpr bool has(int number) { return ((number == list) || ...); }

  template <class Use>
  [[gnu::always_inline]] static constexpr decltype(auto) with(int number, Use use) {
    return pick<list...>(number, use);
  }

 private:
  template <int first, int... others, class Use>
  [[gnu::always_inline]] static constexpr decltype(auto) pick(int number, Use use) {
    if constexpr (sizeof...(others) == 0) {
      return use(std::integral_constant<int, first>{});
    } else {
      return number == first ? use(std::integral_constant<int, first>{}) : pick<others...>(number, use);
    }
  }
};

using CodeWidths = OneOf<2, 4, 8>;

// The operations of one width of codes on instruction set S: packing, unpacking and products. Widths that divide a byte
// share one definition (hack_pages.h); another width, such as 3 bits, needs a place in the list above and a specialization.
template <class S, int bits>
struct Width;

// use(Width) with the width of `bits` bits.
template <class S, class Use>
[[gnu::always_inline]] constexpr decltype(auto) with_width(int bits, Use use) {
  return CodeWidths::with(bits, [&](auto constant) __attribute__((always_inline)) { return use(Width<S, constant>{}); });
}

}  // namespace hack
