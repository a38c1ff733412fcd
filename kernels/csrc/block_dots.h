// Codes times rows of x in bytes (block_tiles.h), on units that multiply bytes to sums of 32 bits. Lower digits are
// multiplied only where one of the rows taken together has a lower digit.
#pragma once

#include "block_tiles.h"

namespace hack {

template <class S, int bits>
struct BlockDots {
  using Lanes = S;
  static constexpr int kBits = bits;
  static constexpr int kTiles = 2;
  static constexpr int kQuads = kBlockColumns / 4;
  static constexpr int kWideBlock = kBlockColumns * kLanes;  // a byte for each code

  static void widen(const std::byte* block, std::byte* codes) {
    unrolled<kQuads>([&](auto quad) __attribute__((always_inline)) {
      S::store_int(codes + 64 * quad, codes_of<false, quad>(block));
    });
  }

  static void fetch(const RowBlock*, int) {}  // the processor's own fetching keeps up with rows of x

  // Does what BlockDigits::form_sums does. The upper digits' sums become floats before there are others, so that all stay
  // in registers.
  template <int R, int N, bool wide, class Take>
  [[gnu::always_inline]] static void form_sums(const std::byte* from, std::int64_t stride, const RowBlock& x, int place,
                                               Take take) {
    typename S::I dots[R * N];
    typename S::F sums[R * N];
    add_digit<R, N, wide, 0>(from, stride, x, place, dots);
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { sums[i] = S::to_float(dots[i]); });
    if (x.any_fine<R>(place)) {
      asm volatile("" ::: "memory");  // GCC would keep all codes of the block in memory rather than load them again
      add_digit<R, N, wide, 1>(from, stride, x, place, dots);
      unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
        sums[i] = S::fused(sums[i], S::splat(kDigitBase), S::to_float(dots[i]));
      });
    } else {
      unrolled<R * N>([&](auto i) __attribute__((always_inline)) { sums[i] = S::mul(sums[i], S::splat(kDigitBase)); });
    }
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { take(i, sums[i]); });
  }

 private:
  template <bool wide, int quad>
  [[gnu::always_inline]] static typename S::I codes_of(const std::byte* block) {
    if constexpr (wide || bits == 8) return S::load_int(block + 64 * quad);
    else return S::template plane<bits, quad / 4>(S::load_int(block + 64 * (quad % 4)));
  }

  // The products of one digit.
  template <int R, int N, bool wide, int digit>
  [[gnu::always_inline]] static void add_digit(const std::byte* from, std::int64_t stride, const RowBlock& x, int place,
                                               typename S::I (&dots)[R * N]) {
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
      dots[i] = bits == 8 ? S::splat_int(x.starts[digit][place + i / N]) : S::zero_int();
    });
    const std::int8_t* rows = x.codes[digit][place];
    unrolled<kQuads>([&](auto quad) __attribute__((always_inline)) {
      typename S::I codes[N];
      unrolled<N>([&](auto n) __attribute__((always_inline)) { codes[n] = codes_of<wide, quad>(from + n * stride); });
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        const auto four = S::broadcast_quad(rows + r * kBlockColumns + 4 * quad);
        unrolled<N>([&](auto n) __attribute__((always_inline)) {
          dots[r * N + n] = S::template dot<bits>(dots[r * N + n], codes[n], four);
        });
      });
    });
  }
};

template <class S, Dtype dtype>
void multiply_dots(const BlockItem& item, std::byte* scratch) {
  item.bits == 8 ? code_product<BlockDots<S, 8>, dtype>(item, scratch)
                 : code_product<BlockDots<S, 4>, dtype>(item, scratch);
}

}  // namespace hack
