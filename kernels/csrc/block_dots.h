// Codes times rows of x in bytes (block_tiles.h), on units that multiply bytes to sums of 32 bits. Lower digits are
// multiplied only where one of the rows taken together has a lower digit.
#pragma once

#include "block_bytes.h"

namespace hack {

template <class S, int bits>
struct BlockDots : BlockBytes<S, bits> {
  static void fetch(const RowBlock*, int) {}  // the processor's own fetching keeps up with rows of x

  // Does what BlockDigits::form_sums does. The upper digits' sums become floats before there are others, so that all stay
  // in registers.
  template <int R, int N, bool wide, class Take>
  [[gnu::always_inline]] static void form_sums(const std::byte* from, std::int64_t stride, const RowBlock& x, int place,
                                               Take take) {
    typename S::I dots[R * N];
    typename S::F sums[R * N];
    BlockDots::template add_digit<R, N, wide, 0>(from, stride, x, place, dots);
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { sums[i] = S::to_float(dots[i]); });
    if (x.any_fine<R>(place)) {
      asm volatile("" ::: "memory");  // GCC would keep all codes of the block in memory rather than load them again
      BlockDots::template add_digit<R, N, wide, 1>(from, stride, x, place, dots);
      unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
        sums[i] = S::fused(sums[i], S::splat(kDigitBase), S::to_float(dots[i]));
      });
    } else {
      unrolled<R * N>([&](auto i) __attribute__((always_inline)) { sums[i] = S::mul(sums[i], S::splat(kDigitBase)); });
    }
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { take(i, sums[i]); });
  }
};

template <class S, Dtype dtype>
void multiply_dots(const BlockItem& item, std::byte* scratch) {
  item.bits == 8 ? code_product<BlockDots<S, 8>, dtype>(item, scratch)
                 : code_product<BlockDots<S, 4>, dtype>(item, scratch);
}

}  // namespace hack
