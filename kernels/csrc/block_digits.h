// Codes of 4 bits times rows most of whose blocks have one digit (block_tiles.h): products of bytes to sums of 16 bits.
// Lower digits are multiplied only where one of the rows taken together has a lower digit.
#pragma once

#include "block_bytes.h"

namespace hack {

template <class S>
struct BlockDigits : BlockBytes<S, 4> {
  static_assert(S::template kRunOfDots<4> >= BlockDigits::kQuads);

  // Lower digits are not prefetched: few blocks have any.
  static void fetch(const RowBlock* x, int place) {
    __builtin_prefetch(x->codes[0][place]);
    __builtin_prefetch(x->codes[0][place + S::kBlockRows / 2]);
    __builtin_prefetch(x->scales + place);
    __builtin_prefetch(x->sums + place);
    __builtin_prefetch(x->fine + place);
  }

  // take(i, sum) for the sums [R, N] of a block, `from` and `stride` as for `add_digit`. Sums without lower digits are
  // taken in a branch of their own, where they stay in registers.
  template <int R, int N, bool wide, class Take>
  [[gnu::always_inline]] static void form_sums(const std::byte* from, std::int64_t stride, const RowBlock& x, int place,
                                               Take take) {
    typename S::I runs[R * N];
    BlockDigits::template add_digit<R, N, wide, 0, 0>(from, stride, x, place, runs);
    if (!x.any_fine<R>(place)) [[likely]] {
      unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
        take(i, S::to_float(S::run_total(runs[i], int(kDigitBase))));
      });
      return;
    }
    typename S::I sums[R * N];
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { sums[i] = S::run_total(runs[i], int(kDigitBase)); });
    asm volatile("" ::: "memory");  // GCC would keep all codes of the block in memory rather than load them again
    BlockDigits::template add_digit<R, N, wide, 1, 0>(from, stride, x, place, runs);
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
      take(i, S::to_float(S::add_int(sums[i], S::run_total(runs[i], 1))));
    });
  }
};

}  // namespace hack
