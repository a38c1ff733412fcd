// Products with weights that rest as codes on a unit that multiplies whole tiles (AMX-INT8): the bits of block_product.h.
//
// A tile of a weight is unpacked once for many rows of x. The unit forms the integer sums of a block for 16 rows at
// once. They pass through memory, and vectors add blocks as those of block_product.h do.
#pragma once

#include "block_product.h"
#include "product.h"
#include "simd/amx.h"

namespace hack {

inline constexpr int kTurns = 4;  // blocks whose sums lie in memory
inline constexpr int kAhead = 2;  // sums are formed so many blocks before they are added: neither waits

// 16 rows of a weight, unpacked.
struct WideTile {
  std::int8_t* codes;  // [blocks, 8 quads, 16, 4]: of 8 bits less 128
  float* scales;       // [blocks, 16]
  float* minima;       // [blocks, 16]
};

// Codes and numbers of a tile of w in `scratch` (`block_scratch_bytes`).
template <class S, int bits>
WideTile widen_tile(const BlockItem& item, std::int64_t tile, std::byte* scratch) {
  constexpr int kWide = kBlockColumns * kLanes, kCodes = kWide * bits / 8;
  const std::int64_t blocks = item.x.blocks;
  auto* numbers = reinterpret_cast<float*>(scratch + blocks * kWide);
  const WideTile wide{reinterpret_cast<std::int8_t*>(scratch), numbers, numbers + blocks * kLanes};
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
    const BlockScales<S, bits> numbers_of(block + kCodes);
    S::store(wide.scales + b * kLanes, numbers_of.scale);
    if constexpr (bits == 4) S::store(wide.minima + b * kLanes, numbers_of.minimum);
  }
  return wide;
}

// Sums [16 rows, 16] of a block of 16 rows of x and of a tile, which are `x_stride` and 64 bytes apart. Turns follow one
// another and have registers of their own.
template <class S, int turn>
[[gnu::always_inline]] inline void matrix_sums(const std::int8_t* x, std::int64_t x_stride, const std::int8_t* w,
                                               std::int32_t* sums) {
  S::tiles_see_memory();
  if constexpr (turn == 0) {
    _tile_zero(0);
    _tile_loadd(4, x, x_stride);
    _tile_loadd(6, w, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, sums, 64);
  } else if constexpr (turn == 1) {
    _tile_zero(1);
    _tile_loadd(5, x, x_stride);
    _tile_loadd(7, w, 64);
    _tile_dpbssd(1, 5, 7);
    _tile_stored(1, sums, 64);
  } else if constexpr (turn == 2) {
    _tile_zero(2);
    _tile_loadd(4, x, x_stride);
    _tile_loadd(6, w, 64);
    _tile_dpbssd(2, 4, 6);
    _tile_stored(2, sums, 64);
  } else {
    _tile_zero(3);
    _tile_loadd(5, x, x_stride);
    _tile_loadd(7, w, 64);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(3, sums, 64);
  }
  S::tiles_see_memory();
}

// 16 rows of x, from row `row` on, times a tile of w.
template <class S, Dtype dtype, int bits>
void matrix_tile(const BlockItem& item, std::int64_t row, std::int64_t tile, const WideTile& w) {
  alignas(64) std::int32_t sums[kTurns][kLanes * kLanes];
  const BlockRow x = item.x.row(row);
  const std::int64_t stride = item.x.stride();
  const int blocks = item.x.blocks;
  typename S::F totals[kLanes];
  unrolled<kLanes>([&](auto r) __attribute__((always_inline)) { totals[r] = S::zero(); });
  for (int first = 0; first < blocks + kAhead; first += kTurns) {
    unrolled<kTurns>([&](auto turn) __attribute__((always_inline)) {
      if (const int b = first + turn; b < blocks)
        matrix_sums<S, turn>(x.codes + b * kBlockColumns, stride, w.codes + b * kBlockColumns * kLanes, sums[turn]);
      const int b = first + turn - kAhead;
      if (b < 0 || b >= blocks) return;
      const BlockScales<S, bits> scales(w.scales + b * kLanes, w.minima + b * kLanes);
      unrolled<kLanes>([&](auto r) __attribute__((always_inline)) {
        const auto of_row = S::load_int(sums[(turn + kTurns - kAhead) % kTurns] + r * kLanes);
        totals[r] = scales.add(totals[r], of_row, x.after(r * stride), b);
      });
    });
  }
  unrolled<kLanes>([&](auto r) __attribute__((always_inline)) {
    write_block<S, dtype>(item, row + r, tile, totals[r]);
  });
}

template <class S, Dtype dtype, int bits>
void matrix_rows(const BlockItem& item, std::int64_t last, std::byte* scratch) {
  const typename S::BlockTiles tiles;
  for (std::int64_t tile = item.first_tile; tile < item.last_tile; ++tile) {
    const WideTile wide = widen_tile<S, bits>(item, tile, scratch);
    for (std::int64_t row = item.first_row; row < last; row += kLanes)
      matrix_tile<S, dtype, bits>(item, row, tile, wide);
  }
}

// As block_product_of; what is left of 16 rows goes there.
template <class S, Dtype dtype>
void block_matrix_product_of(const BlockItem& item, std::byte* scratch) {
  const std::int64_t last = item.first_row + (item.last_row - item.first_row) / kLanes * kLanes;
  if (last > item.first_row)
    item.bits == 8 ? matrix_rows<S, dtype, 8>(item, last, scratch) : matrix_rows<S, dtype, 4>(item, last, scratch);
  BlockItem rest = item;
  rest.first_row = last;
  if (last < item.last_row) block_product_of<S, dtype>(rest, scratch);
}

}  // namespace hack
