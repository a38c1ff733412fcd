// Codes of a weight as bytes, for products with rows of x in bytes (block_dots.h, block_digits.h).
#pragma once

#include "block_tiles.h"

namespace hack {

template <class S, int bits>
struct BlockBytes {
  using Lanes = S;
  static constexpr int kBits = bits;
  static constexpr int kTiles = std::max(2, S::template kBlockTiles<S::kBlockRows>);
  static constexpr int kQuads = kBlockColumns / 4;
  static constexpr int kWideCodes = kBlockColumns * kLanes;  // a byte for each code

  static void widen(const std::byte* block, std::byte* codes) {
    unrolled<kQuads>([&](auto quad) __attribute__((always_inline)) {
      S::store_int(codes + 64 * quad, codes_of<false, quad>(block));
    });
  }

 protected:
  // Products of one digit of R rows of x with the codes of N tiles, added in `runs` [R, N]. `from` has the codes of a
  // block as they rest, or widened. Those of the next tile lie `stride` bytes further on. Sums begin at `start`.
  template <int R, int N, bool wide, int digit, int start>
  [[gnu::always_inline]] static void add_digit(const std::byte* from, std::int64_t stride, const RowBlock& x, int place,
                                               typename S::I (&runs)[R * N]) {
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
      runs[i] = S::splat_int(start);
      if constexpr (bits == 8) runs[i] = S::add_int(runs[i], S::splat_int(x.starts[digit][place + i / N]));
    });
    const std::int8_t* rows = x.codes[digit][place];
    unrolled<kQuads>([&](auto quad) __attribute__((always_inline)) {
      typename S::I codes[N];
      unrolled<N>([&](auto n) __attribute__((always_inline)) { codes[n] = codes_of<wide, quad>(from + n * stride); });
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        const auto four = S::broadcast_quad(rows + r * kBlockColumns + 4 * quad);
        unrolled<N>([&](auto n) __attribute__((always_inline)) {
          runs[r * N + n] = S::template run_dot<bits>(runs[r * N + n], codes[n], four);
        });
      });
    });
  }

 private:
  template <bool wide, int quad>
  [[gnu::always_inline]] static typename S::I codes_of(const std::byte* block) {
    if constexpr (wide || bits == 8) return S::load_int(block + 64 * quad);
    else return S::template plane<bits, quad / 4>(S::load_int(block + 64 * (quad % 4)));
  }
};

}  // namespace hack
