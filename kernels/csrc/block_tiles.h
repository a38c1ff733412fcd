// Products with weights that rest as codes (block_product.h), tile by tile.
//
// `Codes` says how codes are multiplied by rows of x: `BlockDots` (block_dots.h), `BlockWords` (block_words.h) or
// `BlockDigits` (block_digits.h). Where a tile of a weight is multiplied by many rows, its codes are widened once. A unit
// of vectors multiplies up to S::kBlockRows rows of x at once, R of them by S::kBlockTiles<R> tiles.
#pragma once

#include <algorithm>

#include "block_product.h"

namespace hack {

inline constexpr int kTilesFollowed = 4;  // a processor's own fetching keeps up with so many tiles at once

// Fetches a block of N tiles. A row of a weight is so short that the processor's own fetching would begin anew with each.
template <int bits, int N>
[[gnu::always_inline]] inline void fetch_block(const std::byte* block, std::int64_t tile_bytes) {
  for (int n = 0; n < N; ++n)
    for (int line = 0; line < block_bytes(bits); line += 64) __builtin_prefetch(block + n * tile_bytes + line);
}

// A widened block of a tile of w: its codes, then its numbers in FP32 as a BlockScales.
template <class Codes>
inline constexpr std::int64_t kWideBlock =
    Codes::kWideCodes + BlockScales<typename Codes::Lanes, Codes::kBits>::kNumbers * sizeof(float);

// Bytes of a widened tile of w.
template <class Codes>
std::int64_t wide_bytes(const BlockItem& item) {
  return std::int64_t(item.x.blocks) * kWideBlock<Codes>;
}

// The numbers of a block of w, or of a widened one.
template <class Codes, bool wide>
[[gnu::always_inline]] inline auto scales_of(const std::byte* block) {
  using Scales = BlockScales<typename Codes::Lanes, Codes::kBits>;
  if constexpr (wide) return Scales(reinterpret_cast<const float*>(block + Codes::kWideCodes));
  else return Scales(block + kBlockColumns * kLanes * Codes::kBits / 8);
}

// R rows of x of one group, from row `row` on, times N tiles of w from `tile` on. `block`: the first block of these
// tiles, as it rests or widened.
template <class Codes, Dtype dtype, int R, int N, bool wide>
void code_tile(const BlockItem& item, std::int64_t row, std::int64_t tile, const std::byte* block) {
  using S = typename Codes::Lanes;
  constexpr std::int64_t step = wide ? kWideBlock<Codes> : block_bytes(Codes::kBits);
  typename S::F totals[R * N];
  const RowBlock* x = item.x.group_of(row);
  const int place = int(row % kLanes);
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) { totals[i] = S::zero(); });
  const std::int64_t stride = wide ? wide_bytes<Codes>(item) : item.tile_bytes;
  for (int b = 0; b < item.x.blocks; ++b, ++x, block += step) {
    if constexpr (wide) Codes::fetch(x + 1, place);
    else if constexpr (N < kTilesFollowed) fetch_block<Codes::kBits, N>(block + N * stride, stride);
    Codes::template form_sums<R, N, wide>(
        block, stride, *x, place, [&](auto i, typename S::F sum) __attribute__((always_inline)) {
          totals[i] = scales_of<Codes, wide>(block + i % N * stride).add(totals[i], sum, *x, place + i / N);
        });
  }
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
    write_block<S, dtype>(item, row + i / N, tile + i % N, totals[i]);
  });
}

// Widens a tile of w.
template <class Codes>
void widen_blocks(const BlockItem& item, std::int64_t tile, std::byte* wide) {
  const std::byte* block = item.w + tile * item.tile_bytes;
  for (int b = 0; b < item.x.blocks; ++b, block += block_bytes(Codes::kBits), wide += kWideBlock<Codes>) {
    Codes::widen(block, wide);
    scales_of<Codes, false>(block).store(reinterpret_cast<float*>(wide + Codes::kWideCodes));
  }
}

// Whole groups of S::kBlockRows rows of x, times all tiles. Returns the first row that is left. With more tiles at a time
// rows of x are read less often from the second-level cache. `Codes` says how many tiles are widened at once.
template <class Codes, Dtype dtype>
std::int64_t wide_rows(const BlockItem& item, std::byte* scratch) {
  using S = typename Codes::Lanes;
  constexpr int R = S::kBlockRows, N = S::template kBlockTiles<R>;
  static_assert(block_scratch_bytes(64) >= 64 * Codes::kTiles * kWideBlock<Codes> && Codes::kTiles % N == 0);
  const std::int64_t bytes = wide_bytes<Codes>(item);
  const std::int64_t last = item.first_row + (item.last_row - item.first_row) / R * R;
  for (std::int64_t tile = item.first_tile; tile < item.last_tile; tile += Codes::kTiles) {
    const std::int64_t count = tile + Codes::kTiles <= item.last_tile ? Codes::kTiles : item.last_tile - tile;
    for (std::int64_t i = 0; i < count; ++i) widen_blocks<Codes>(item, tile + i, scratch + i * bytes);
    for (std::int64_t row = item.first_row; row < last; row += R) {
      std::int64_t i = 0;
      for (; i + N <= count; i += N) code_tile<Codes, dtype, R, N, true>(item, row, tile + i, scratch + i * bytes);
      if constexpr (N > 1)
        for (; i < count; ++i) code_tile<Codes, dtype, R, 1, true>(item, row, tile + i, scratch + i * bytes);
    }
  }
  return last;
}

// Rows of x, R at a time from `row` on, times `tiles` tiles of w. Returns the first row that is left.
template <class Codes, Dtype dtype, int R, int tiles>
std::int64_t few_rows(const BlockItem& item, std::int64_t row, std::int64_t tile) {
  constexpr int N = std::min(tiles, Codes::Lanes::template kBlockTiles<R>);
  static_assert(tiles % N == 0);
  if constexpr (R <= Codes::Lanes::kBlockRows)
    for (; row + R <= item.last_row; row += R)
      for (int i = 0; i < tiles; i += N)
        code_tile<Codes, dtype, R, N, false>(item, row, tile + i, item.w + (tile + i) * item.tile_bytes);
  return row;
}

// All rows of x from `row` on, times `tiles` tiles of w.
template <class Codes, Dtype dtype, int tiles>
void rows_left(const BlockItem& item, std::int64_t row, std::int64_t tile) {
  row = few_rows<Codes, dtype, 4, tiles>(item, row, tile);
  row = few_rows<Codes, dtype, 2, tiles>(item, row, tile);
  few_rows<Codes, dtype, 1, tiles>(item, row, tile);
}

template <class Codes, Dtype dtype>
void code_product(const BlockItem& item, std::byte* scratch) {
  constexpr int kTiles = Codes::Lanes::template kBlockTiles<1>;
  const bool wide = item.last_row - item.first_row >= kLanes;
  const std::int64_t row = wide ? wide_rows<Codes, dtype>(item, scratch) : item.first_row;
  if (row == item.last_row) return;
  std::int64_t tile = item.first_tile;
  for (; tile + kTiles <= item.last_tile; tile += kTiles) rows_left<Codes, dtype, kTiles>(item, row, tile);
  for (; tile < item.last_tile; ++tile) rows_left<Codes, dtype, 1>(item, row, tile);
}

}  // namespace hack
