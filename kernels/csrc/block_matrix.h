// Products with weights that rest as codes, on a unit that multiplies whole tiles (AMX-INT8). Results have the same
// bits as those of block_tiles.h.
//
// A tile of a weight is unpacked once for many rows of x. The unit forms the integer sums of a block for 16 rows at
// once. They pass through memory, and vectors add blocks as those of block_tiles.h do.
#pragma once

#include "block_dots.h"
#include "product.h"
#include "simd/amx.h"

namespace hack {

// 16 rows of a weight, unpacked.
struct WideTile {
  std::int8_t* codes;  // [blocks, 8 quads, 16, 4]: of 8 bits less 128
  float* numbers;      // of all blocks, each as a BlockScales

  template <class S, int bits>
  float* numbers_of(std::int64_t block) const {
    return numbers + block * BlockScales<S, bits>::kNumbers;
  }
};

// Codes and numbers of a tile of w in `scratch` (`wide_tile_bytes`).
template <class S, int bits>
WideTile widen_tile(const BlockItem& item, std::int64_t tile, std::byte* scratch) {
  constexpr int kWide = kBlockColumns * kLanes, kCodes = kWide * bits / 8;
  const std::int64_t blocks = item.x.blocks;
  const WideTile wide{reinterpret_cast<std::int8_t*>(scratch), reinterpret_cast<float*>(scratch + blocks * kWide)};
  const std::byte* block = item.w + tile * item.tile_bytes;
  for (std::int64_t b = 0; b < blocks; ++b, block += block_bytes(bits)) {
    std::int8_t* codes = wide.codes + b * kWide;
    unrolled<bits>([&](auto quad) __attribute__((always_inline)) {
      const auto packed = S::load_int(block + 64 * quad);
      if constexpr (bits == 8) {
        S::store_int(codes + 64 * quad, _mm512_xor_si512(packed, _mm512_set1_epi8(-128)));
      } else {
        S::store_int(codes + 64 * quad, S::template plane<bits, 0>(packed));
        S::store_int(codes + 64 * (quad + 4), S::template plane<bits, 1>(packed));
      }
    });
    BlockScales<S, bits>(block + kCodes).store(wide.template numbers_of<S, bits>(b));
  }
  return wide;
}

// Forms sums in tiles 0 to 3: [16 rows, 16] for each of both bytes of two blocks of 16 rows of x, times a tile of w.
// With an odd number of blocks it reads one block past the last. That memory exists (`wide_tile_bytes`); its sums are
// unused.
template <class S>
[[gnu::always_inline]] inline void form_sums(const RowBlock* x, const std::int8_t* w) {
  S::tiles_see_memory();
  _tile_loadd(6, w, 64);
  _tile_zero(0);
  _tile_loadd(4, x[0].codes[0], kBlockColumns);
  _tile_dpbssd(0, 4, 6);
  _tile_zero(1);
  _tile_loadd(5, x[0].codes[1], kBlockColumns);
  _tile_dpbssd(1, 5, 6);
  _tile_loadd(7, w + kBlockColumns * kLanes, 64);
  _tile_zero(2);
  _tile_loadd(4, x[1].codes[0], kBlockColumns);
  _tile_dpbssd(2, 4, 7);
  _tile_zero(3);
  _tile_loadd(5, x[1].codes[1], kBlockColumns);
  _tile_dpbssd(3, 5, 7);
}

template <class S, int tile>
[[gnu::always_inline]] inline void store_sums(std::int32_t* sums) {
  if constexpr (tile == 0) _tile_stored(0, sums, 64);
  if constexpr (tile == 1) _tile_stored(1, sums, 64);
  if constexpr (tile == 2) _tile_stored(2, sums, 64);
  if constexpr (tile == 3) _tile_stored(3, sums, 64);
  S::tiles_see_memory();
}

// 16 rows of x, from row `row` on, times a tile of w. The unit forms sums of two blocks while vectors add the sums of
// the two blocks before.
template <class S, Dtype dtype, int bits>
void matrix_tile(const BlockItem& item, std::int64_t row, std::int64_t tile, const WideTile& w) {
  alignas(64) std::int32_t sums[2][kMatrixBlocks][kRowBytes][kLanes * kLanes];
  const RowBlock* x = item.x.group_of(row);
  const int blocks = item.x.blocks;
  typename S::F totals[kLanes];
  unrolled<kLanes>([&](auto r) __attribute__((always_inline)) { totals[r] = S::zero(); });
  const auto add = [&](int b, const std::int32_t (*from)[kLanes * kLanes]) __attribute__((always_inline)) {
    const BlockScales<S, bits> scales(w.template numbers_of<S, bits>(b));
    unrolled<kLanes>([&](auto r) __attribute__((always_inline)) {
      const auto upper = S::load_int(from[0] + r * kLanes), lower = S::load_int(from[1] + r * kLanes);
      const auto sum = S::fused(S::to_float(upper), S::splat(kDigitBase), S::to_float(lower));
      totals[r] = scales.add(totals[r], sum, x[b], r);
    });
  };
  int b = 0;
  for (; b < blocks; b += kMatrixBlocks) {
    form_sums<S>(x + b, w.codes + b * kBlockColumns * kLanes);
    const int turn = b / kMatrixBlocks % 2;
    unrolled<kMatrixBlocks>([&](auto i) __attribute__((always_inline)) {
      if (b > 0) add(b - kMatrixBlocks + i, sums[1 - turn][i]);
      store_sums<S, kRowBytes * i>(sums[turn][i][0]);
      store_sums<S, kRowBytes * i + 1>(sums[turn][i][1]);
    });
  }
  for (int i = b - kMatrixBlocks; i < blocks; ++i) add(i, sums[i / kMatrixBlocks % 2][i % kMatrixBlocks]);
  unrolled<kLanes>([&](auto r) __attribute__((always_inline)) {
    write_block<S, dtype>(item, row + r, tile, totals[r]);
  });
}

// Tiles are taken in pairs, so that rows of x are read from the second-level cache half as often.
template <class S, Dtype dtype, int bits>
void matrix_rows(const BlockItem& item, std::int64_t last, std::byte* scratch) {
  const typename S::BlockTiles tiles;
  for (std::int64_t tile = item.first_tile; tile < item.last_tile; tile += kMatrixTiles) {
    const int count = tile + kMatrixTiles <= item.last_tile ? kMatrixTiles : 1;
    WideTile wide[kMatrixTiles];
    for (int i = 0; i < count; ++i)
      wide[i] = widen_tile<S, bits>(item, tile + i, scratch + i * wide_tile_bytes(item.x.blocks));
    for (std::int64_t row = item.first_row; row < last; row += kLanes)
      for (int i = 0; i < count; ++i) matrix_tile<S, dtype, bits>(item, row, tile + i, wide[i]);
  }
}

// Does what multiply_dots does. Rows left over after groups of 16 go to multiply_dots.
template <class S, Dtype dtype>
void block_matrix_product_of(const BlockItem& item, std::byte* scratch) {
  const std::int64_t last = item.first_row + (item.last_row - item.first_row) / kLanes * kLanes;
  if (last > item.first_row)
    item.bits == 8 ? matrix_rows<S, dtype, 8>(item, last, scratch) : matrix_rows<S, dtype, 4>(item, last, scratch);
  BlockItem rest = item;
  rest.first_row = last;
  if (last < item.last_row) multiply_dots<S, dtype>(rest, scratch);
}

}  // namespace hack
