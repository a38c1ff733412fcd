// Codes times rows of x in bytes (block_tiles.h), on units that multiply bytes to sums of 32 bits. Lower digits are
// multiplied only where one of the rows taken together has a lower digit.
#pragma once

#include "block_bytes.h"

namespace hack {

template <class S, int bits>
struct BlockDots : BlockBytes<S, bits> {
  static void fetch(const RowBlock*, int) {}  // the processor's own fetching keeps up with rows of x

  // Does what BlockDigits::form_sums does. In a block with lower digits, sums of upper digits wait in memory. If they
  // stayed in registers, the compiler would keep totals in memory, in blocks without lower digits too.
  template <int R, int N, bool wide, class Take>
  [[gnu::always_inline]] static void form_sums(const std::byte* from, std::int64_t stride, const RowBlock& x, int place,
                                               Take take) {
    typename S::I dots[R * N];
    typename S::F sums[R * N];
    BlockDots::template add_digit<R, N, wide, 0, S::kSumStart>(from, stride, x, place, dots);
    if (x.any_fine<R>(place)) {
      float upper[R * N][kLanes];
      unrolled<R * N>([&](auto i) __attribute__((always_inline)) { S::store(upper[i], S::whole_sum(dots[i])); });
      asm volatile("" : "+m"(upper)::"memory");  // GCC would keep sums and codes in registers
      BlockDots::template add_digit<R, N, wide, 1, S::kSumStart>(from, stride, x, place, dots);
      unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
        sums[i] = S::fused(S::load(upper[i]), S::splat(kDigitBase), S::whole_sum(dots[i]));
      });
    } else {
      unrolled<R * N>([&](auto i) __attribute__((always_inline)) { sums[i] = S::scaled_sum(dots[i], kDigitBase); });
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
