// Codes of 4 bits times rows most of whose blocks have one digit (block_tiles.h): products of bytes to sums of 16 bits.
// Lower digits are multiplied only where one of the rows taken together has a lower digit.
#pragma once

#include "block_tiles.h"

namespace hack {

template <class S>
struct BlockDigits {
  using Lanes = S;
  static constexpr int kBits = 4;
  static constexpr int kTiles = 2;
  static constexpr int kQuads = kBlockColumns / 4;
  static constexpr int kWideBlock = kBlockColumns * kLanes;  // a byte for each code
  static_assert(S::template kRunOfDots<kBits> >= kQuads);

  static void widen(const std::byte* block, std::byte* codes) {
    unrolled<kQuads>([&](auto quad) __attribute__((always_inline)) {
      S::store_int(codes + 64 * quad, codes_of<false, quad>(block));
    });
  }

  // Lower digits are not prefetched: few blocks have any.
  static void fetch(const RowBlock* x, int place) {
    __builtin_prefetch(x->codes[0][place]);
    __builtin_prefetch(x->codes[0][place + S::kBlockRows / 2]);
    __builtin_prefetch(x->scales + place);
    __builtin_prefetch(x->sums + place);
    __builtin_prefetch(x->fine + place);
  }

  // take(i, sum) for the sums [R, N] of a block. `from` has the codes of N tiles as they rest, or the widened codes of
  // one tile. Sums without lower digits are taken in a branch of their own, where they stay in registers.
  template <int R, int N, bool wide, class Take>
  [[gnu::always_inline]] static void form_sums(const std::byte* from, std::int64_t tile_bytes, const RowBlock& x,
                                               int place, Take take) {
    typename S::I runs[R * N];
    add_digit<R, N, wide, 0>(from, tile_bytes, x, place, runs);
    if (!x.any_fine<R>(place)) [[likely]] {
      unrolled<R * N>([&](auto i) __attribute__((always_inline)) { take(i, S::to_float(S::run_total(runs[i], int(kDigitBase)))); });
      return;
    }
    typename S::I sums[R * N];
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { sums[i] = S::run_total(runs[i], int(kDigitBase)); });
    asm volatile("" ::: "memory");  // GCC would keep all codes of the block in memory rather than load them again
    add_digit<R, N, wide, 1>(from, tile_bytes, x, place, runs);
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
      take(i, S::to_float(S::add_int(sums[i], S::run_total(runs[i], 1))));
    });
  }

 private:
  template <bool wide, int quad>
  [[gnu::always_inline]] static typename S::I codes_of(const std::byte* block) {
    if constexpr (wide) return S::load_int(block + 64 * quad);
    else return S::template plane<kBits, quad / 4>(S::load_int(block + 64 * (quad % 4)));
  }

  // The products of one digit.
  template <int R, int N, bool wide, int digit>
  [[gnu::always_inline]] static void add_digit(const std::byte* from, std::int64_t tile_bytes, const RowBlock& x,
                                               int place, typename S::I (&runs)[R * N]) {
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { runs[i] = S::zero_int(); });
    const std::int8_t* rows = x.codes[digit][place];
    unrolled<kQuads>([&](auto quad) __attribute__((always_inline)) {
      typename S::I codes[N];
      unrolled<N>([&](auto n) __attribute__((always_inline)) {
        codes[n] = codes_of<wide, quad>(from + n * tile_bytes);
      });
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        const auto four = S::broadcast_quad(rows + r * kBlockColumns + 4 * quad);
        unrolled<N>([&](auto n) __attribute__((always_inline)) {
          runs[r * N + n] = S::template run_dot<kBits>(runs[r * N + n], codes[n], four);
        });
      });
    });
  }
};

}  // namespace hack
