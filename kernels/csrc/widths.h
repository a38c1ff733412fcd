// The widths of codes: the only list of them.
#pragma once

#include <cstdint>
#include <type_traits>

namespace hack {

inline constexpr int kNarrow = 4;  // bits up to which sums of two products of a code and a byte fit 16 bits

// use(bits) with the width of codes as a compile-time constant.
template <class Use>
[[gnu::always_inline]] constexpr decltype(auto) with_bits(int bits, Use use) {
  switch (bits) {
    case 2: return use(std::integral_constant<int, 2>{});
    case 4: return use(std::integral_constant<int, 4>{});
    default: return use(std::integral_constant<int, 8>{});
  }
}
constexpr bool is_width(int bits) {
  return with_bits(bits, [&](auto width) { return width == bits; });
}

// The operations of one width of codes on instruction set S: packing, unpacking and products. Widths that divide a byte
// share one definition (hack_pages.h); another width, such as 3 bits, needs a case above and a specialization.
template <class S, int bits>
struct Width;

// use(Width) with the width of `bits` bits.
template <class S, class Use>
[[gnu::always_inline]] constexpr decltype(auto) with_width(int bits, Use use) {
  return with_bits(bits, [&](auto constant) __attribute__((always_inline)) { return use(Width<S, constant>{}); });
}

}  // namespace hack
