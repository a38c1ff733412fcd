// Products with weights that rest as codes of 4 bits, on units that multiply bytes to sums of 16 bits (AVX2): the bits of
// block_product.h.
//
// A sum of 16 bits holds a digit's products with two columns of each quad of a block. Where a tile of a weight meets many
// rows of x, its codes are made bytes once.
#pragma once

#include "block_product.h"

namespace hack {

inline constexpr int kQuads = kBlockColumns / 4;           // of a block
inline constexpr int kDigitRows = 4;                       // rows of x at a time, of one group
inline constexpr int kByteBlock = kBlockColumns * kLanes;  // bytes of a block of a tile, a code in each
static_assert(block_scratch_bytes(1) >= kWideTiles * kByteBlock);

// Codes of quad `quad` of a block: as they rest, or a byte each.
template <class S, bool wide, int quad>
[[gnu::always_inline]] inline typename S::I quad_codes(const std::byte* block) {
  if constexpr (wide) return S::load_int(block + 64 * quad);
  else return S::template plane<4, quad / 4>(S::load_int(block + 64 * (quad % 4)));
}

// Adds `weight` times the products of digit `digit` of R rows of a block of x with the codes of N tiles.
template <class S, int R, int N, bool wide, int digit, int weight>
[[gnu::always_inline]] inline void add_digit(const std::byte* block, std::int64_t tile_bytes, const RowBlock& x, int place,
                                             typename S::I (&sums)[R * N]) {
  static_assert(S::template kRunOfDots<4> >= kQuads);
  typename S::I runs[R * N];
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) { runs[i] = S::zero_int(); });
  const std::int8_t* rows = x.codes[digit][place];
  unrolled<kQuads>([&](auto quad) __attribute__((always_inline)) {
    typename S::I codes[N];
    unrolled<N>([&](auto n) __attribute__((always_inline)) {
      codes[n] = quad_codes<S, wide, quad>(block + n * tile_bytes);
    });
    unrolled<R>([&](auto r) __attribute__((always_inline)) {
      const auto four = S::broadcast_quad(rows + r * kBlockColumns + 4 * quad);
      unrolled<N>([&](auto n) __attribute__((always_inline)) {
        runs[r * N + n] = S::template run_dot<4>(runs[r * N + n], codes[n], four);
      });
    });
  });
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
    sums[i] = S::add_int(sums[i], S::run_total(runs[i], weight));
  });
}

// Fetches what a tile reads of a block of kDigitRows rows, but for lower digits.
inline void fetch_rows(const RowBlock& x, int place) {
  __builtin_prefetch(x.codes[0][place]);
  __builtin_prefetch(x.codes[0][place + kDigitRows / 2]);
  __builtin_prefetch(x.scales + place);
  __builtin_prefetch(x.sums + place);
  __builtin_prefetch(x.fine + place);
}

// R rows of x, from row `row` on, of one group, times N tiles of w from `tile` on. `codes`: of the tile, or null.
template <class S, Dtype dtype, int R, int N, bool wide>
void digit_tile(const BlockItem& item, std::int64_t row, std::int64_t tile, const std::byte* codes) {
  static_assert(!wide || N == 1);
  typename S::F totals[R * N];
  const RowBlock* x = item.x.group_of(row);
  const int place = int(row % kLanes);
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) { totals[i] = S::zero(); });
  const std::byte* block = item.w + tile * item.tile_bytes;
  for (int b = 0; b < item.x.blocks; ++b, ++x, block += block_bytes(4), codes += wide ? kByteBlock : 0) {
    typename S::I sums[R * N];
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { sums[i] = S::zero_int(); });
    if constexpr (wide) fetch_rows(x[1], place);
    const std::byte* from = wide ? codes : block;
    add_digit<S, R, N, wide, 0, int(kDigitBase)>(from, item.tile_bytes, *x, place, sums);
    if (x->any_fine<R>(place)) {
      asm volatile("" ::: "memory");  // GCC would keep all codes of the block in memory rather than load them again
      add_digit<S, R, N, wide, 1, 1>(from, item.tile_bytes, *x, place, sums);
    }
    unrolled<N>([&](auto n) __attribute__((always_inline)) {
      const BlockScales<S, 4> scales(block + n * item.tile_bytes + kByteBlock / 2);
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        constexpr int at = r * N + n;
        totals[at] = scales.add(totals[at], S::to_float(sums[at]), *x, place + r);
      });
    });
  }
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
    write_block<S, dtype>(item, row + i / N, tile + i % N, totals[i]);
  });
}

// Codes of a tile of w, a byte each.
template <class S>
void make_bytes(const BlockItem& item, std::int64_t tile, std::byte* codes) {
  const std::byte* block = item.w + tile * item.tile_bytes;
  for (int b = 0; b < item.x.blocks; ++b, block += block_bytes(4), codes += kByteBlock) {
    unrolled<kQuads>([&](auto quad) __attribute__((always_inline)) {
      S::store_int(codes + 64 * quad, quad_codes<S, false, quad>(block));
    });
  }
}

// Whole turns of kDigitRows rows of x times all tiles; returns the first row that is left. Two tiles at a time fill a line
// of the cache with results, and read rows of x from the second-level cache half as often.
template <class S, Dtype dtype>
std::int64_t wide_rows(const BlockItem& item, std::byte* scratch) {
  std::int64_t row = item.first_row;
  for (std::int64_t tile = item.first_tile; tile < item.last_tile; tile += kWideTiles) {
    const std::int64_t count = tile + kWideTiles <= item.last_tile ? kWideTiles : item.last_tile - tile;
    const std::int64_t bytes = std::int64_t(item.x.blocks) * kByteBlock;
    for (std::int64_t i = 0; i < count; ++i) make_bytes<S>(item, tile + i, scratch + i * bytes);
    for (row = item.first_row; row + kDigitRows <= item.last_row; row += kDigitRows)
      for (std::int64_t i = 0; i < count; ++i)
        digit_tile<S, dtype, kDigitRows, 1, true>(item, row, tile + i, scratch + i * bytes);
  }
  return row;
}

// Rows of x, R at a time from `row` on, times a tile of w; returns the first row that is left.
template <class S, Dtype dtype, int R>
std::int64_t digit_rows(const BlockItem& item, std::int64_t row, std::int64_t tile) {
  for (; row + R <= item.last_row; row += R) digit_tile<S, dtype, R, 1, false>(item, row, tile, nullptr);
  return row;
}

template <class S, Dtype dtype>
void digit_product_of(const BlockItem& item, std::byte* scratch) {
  const bool wide = item.last_row - item.first_row >= kLanes;
  const std::int64_t first = wide ? wide_rows<S, dtype>(item, scratch) : item.first_row;
  std::int64_t single = first;
  for (std::int64_t tile = item.first_tile; tile < item.last_tile && first < item.last_row; ++tile)
    single = digit_rows<S, dtype, 2>(item, digit_rows<S, dtype, kDigitRows>(item, first, tile), tile);
  if (single == item.last_row) return;
  std::int64_t tile = item.first_tile;
  for (; tile + 2 <= item.last_tile; tile += 2) digit_tile<S, dtype, 1, 2, false>(item, single, tile, nullptr);
  if (tile < item.last_tile) digit_tile<S, dtype, 1, 1, false>(item, single, tile, nullptr);
}

}  // namespace hack
