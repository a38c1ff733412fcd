// Products with weights that rest as codes, on units that have no product of bytes to sums of 32 bits (AVX2). Results
// have the same bits as those of block_product.h.
//
// `Codes` says how codes are multiplied by rows of x: `BlockWords` (block_words.h) or `BlockDigits` (block_digits.h).
// Where a tile of a weight is multiplied by many rows, its codes are widened once.
#pragma once

#include "block_product.h"

namespace hack {

inline constexpr int kTileGroup = 4;  // rows of x at a time, of one group

// Fetches a block of N tiles. A row of a weight is so short that the processor's own fetching would begin anew with each.
template <int bits, int N>
[[gnu::always_inline]] inline void fetch_block(const std::byte* block, std::int64_t tile_bytes) {
  for (int n = 0; n < N; ++n)
    for (int line = 0; line < block_bytes(bits); line += 64) __builtin_prefetch(block + n * tile_bytes + line);
}

// R rows of x of one group, from row `row` on, times N tiles of w from `tile` on. `codes`: widened codes of a tile or
// null.
template <class Codes, Dtype dtype, int R, int N, bool wide>
void code_tile(const BlockItem& item, std::int64_t row, std::int64_t tile, const std::byte* codes) {
  static_assert(!wide || N == 1);
  using S = typename Codes::Lanes;
  constexpr int bits = Codes::kBits;
  typename S::F totals[R * N];
  const RowBlock* x = item.x.group_of(row);
  const int place = int(row % kLanes);
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) { totals[i] = S::zero(); });
  const std::byte* block = item.w + tile * item.tile_bytes;
  for (int b = 0; b < item.x.blocks; ++b, ++x, block += block_bytes(bits), codes += wide ? Codes::kWideBlock : 0) {
    if constexpr (wide) Codes::fetch(x + 1, place);
    else fetch_block<bits, N>(block + N * item.tile_bytes, item.tile_bytes);
    Codes::template form_sums<R, N, wide>(
        wide ? codes : block, item.tile_bytes, *x, place, [&](auto i, typename S::I sum) __attribute__((always_inline)) {
          const BlockScales<S, bits> scales(block + i % N * item.tile_bytes + kBlockColumns * kLanes * bits / 8);
          totals[i] = scales.add(totals[i], S::to_float(sum), *x, place + i / N);
        });
  }
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
    write_block<S, dtype>(item, row + i / N, tile + i % N, totals[i]);
  });
}

// Widened codes of a tile of w.
template <class Codes>
void widen_tile_codes(const BlockItem& item, std::int64_t tile, std::byte* codes) {
  const std::byte* block = item.w + tile * item.tile_bytes;
  for (int b = 0; b < item.x.blocks; ++b, block += block_bytes(Codes::kBits), codes += Codes::kWideBlock)
    Codes::widen(block, codes);
}

// Whole groups of kTileGroup rows of x, times all tiles. Returns the first row that is left. Two tiles at a time fill a
// cache line with results and read rows of x from the second-level cache half as often. `Codes` says how many tiles fit
// in the first-level cache.
template <class Codes, Dtype dtype>
std::int64_t wide_rows(const BlockItem& item, std::byte* scratch) {
  const std::int64_t bytes = std::int64_t(item.x.blocks) * Codes::kWideBlock;
  const std::int64_t last = item.first_row + (item.last_row - item.first_row) / kTileGroup * kTileGroup;
  for (std::int64_t tile = item.first_tile; tile < item.last_tile; tile += Codes::kTiles) {
    const std::int64_t count = tile + Codes::kTiles <= item.last_tile ? Codes::kTiles : item.last_tile - tile;
    for (std::int64_t i = 0; i < count; ++i) widen_tile_codes<Codes>(item, tile + i, scratch + i * bytes);
    for (std::int64_t row = item.first_row; row < last; row += kTileGroup)
      for (std::int64_t i = 0; i < count; ++i)
        code_tile<Codes, dtype, kTileGroup, 1, true>(item, row, tile + i, scratch + i * bytes);
  }
  return last;
}

// Rows of x, R at a time from `row` on, times a tile of w; returns the first row that is left.
template <class Codes, Dtype dtype, int R>
std::int64_t few_rows(const BlockItem& item, std::int64_t row, std::int64_t tile) {
  for (; row + R <= item.last_row; row += R) code_tile<Codes, dtype, R, 1, false>(item, row, tile, nullptr);
  return row;
}

template <class Codes, Dtype dtype>
void code_product(const BlockItem& item, std::byte* scratch) {
  static_assert(block_scratch_bytes(64) >= 64 * Codes::kTiles * Codes::kWideBlock);
  const bool wide = item.last_row - item.first_row >= kLanes;
  const std::int64_t first = wide ? wide_rows<Codes, dtype>(item, scratch) : item.first_row;
  std::int64_t single = first;
  for (std::int64_t tile = item.first_tile; tile < item.last_tile && first < item.last_row; ++tile)
    single = few_rows<Codes, dtype, 2>(item, few_rows<Codes, dtype, kTileGroup>(item, first, tile), tile);
  if (single == item.last_row) return;
  std::int64_t tile = item.first_tile;
  for (; tile + 2 <= item.last_tile; tile += 2) code_tile<Codes, dtype, 1, 2, false>(item, single, tile, nullptr);
  if (tile < item.last_tile) code_tile<Codes, dtype, 1, 1, false>(item, single, tile, nullptr);
}

}  // namespace hack
