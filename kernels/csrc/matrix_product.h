// Matrix products in BF16 on a unit that multiplies whole tiles (AMX-BF16), with the rows of a weight as they rest.
//
// A tile of a weight is 16 of its rows and 32 columns, wherever they lie in memory. Only x is rewritten, once a call:
// in pairs of columns, [steps of 32 columns][16 pairs][rows][2], so that rows of x become columns of a tile. The unit
// forms the sum of every row of x alone, in steps of 32 columns. So a row does not depend on the rows beside it. As in
// the library, numbers below the normal range count as 0.
#pragma once

#include "bf16_columns.h"
#include "product.h"
#include "simd/amx.h"

namespace hack {

inline constexpr int kTileColumns = kBfloatColumns;  // of a weight, in a step
inline constexpr int kTileBytes = 64;                // of a row of a tile

constexpr int tile_steps(int k) {
  return (k + kTileColumns - 1) / kTileColumns;
}

// Up to `slots` rows of x in pairs. One transpose of 16 vectors serves 16 / slots steps.
template <class S>
void pair_rows(const std::byte* x, std::int64_t stride, int rows, int slots, int k, std::byte* out) {
  const int together = kLanes / slots;
  for (int step = 0; step < tile_steps(k); step += together, out += kPairBytes) {
    typename S::F lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int row = i % slots, at = (step + i / slots) * kTileColumns;
      const bool there = row < rows && at < k;
      lanes[i] = there ? _mm512_castsi512_ps(load_columns(x + row * stride, at, k)) : S::zero();
    }
    S::transpose(lanes);
    for (int i = 0; i < kLanes; ++i) S::store(reinterpret_cast<float*>(out) + i * kLanes, lanes[i]);
  }
}

// One step of sums: 16 rows of a weight for each of `groups`, whose rows lie `apart` bytes apart, times 16 rows of x
// in pairs for each of `blocks`. Four sums at once hide the unit's latency.
template <int groups, int blocks>
[[gnu::always_inline]] inline void tile_step(const std::byte* w, std::int64_t apart, const std::byte* x,
                                             std::int64_t next_block) {
  _tile_loadd(4, x, kTileBytes);
  _tile_loadd(6, w, apart);
  _tile_dpbf16ps(0, 6, 4);
  if constexpr (groups == 4) {
    _tile_loadd(7, w + 16 * apart, apart);
    _tile_dpbf16ps(1, 7, 4);
    _tile_loadd(6, w + 32 * apart, apart);
    _tile_dpbf16ps(2, 6, 4);
    _tile_loadd(7, w + 48 * apart, apart);
    _tile_dpbf16ps(3, 7, 4);
  }
  if constexpr (blocks == 2) {
    _tile_loadd(5, x + next_block, kTileBytes);
    _tile_dpbf16ps(1, 6, 5);
    _tile_loadd(7, w + 16 * apart, apart);
    _tile_dpbf16ps(2, 7, 4);
    _tile_dpbf16ps(3, 7, 5);
  }
}

// Writes to `out` the sums of rows of a weight, from `first` on, with rows of x in pairs, `slots` of them in a tile.
template <class S, int groups, int blocks>
[[gnu::always_inline]] inline void tile_sums(const ProductItem& item, const std::byte* pairs, int slots,
                                             std::int64_t first, float* out) {
  constexpr int kRows = groups * kLanes;
  const int together = kLanes / slots;
  const std::int64_t stride = 2 * std::int64_t(item.k), rows = item.last - first;
  const std::byte* w = item.w + first * stride;
  const auto x = [&](int i) { return pairs + i / together * kPairBytes + i % together * slots * 4; };
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int whole = rows >= kRows ? item.k / kTileColumns : 0;
  for (int i = 0; i < whole; ++i)
    tile_step<groups, blocks>(w + std::int64_t(i) * kTileBytes, stride, x(i), item.x_stride);
  for (int i = whole; i < tile_steps(item.k); ++i) {  // zeros where there is no weight
    alignas(64) std::byte padded[kRows * kTileBytes] = {};
    for (int n = 0; n < kRows && n < rows; ++n)
      _mm512_store_si512(padded + n * kTileBytes, load_columns(w + n * stride, i * kTileColumns, item.k));
    S::tiles_see_memory();
    tile_step<groups, blocks>(padded, kTileBytes, x(i), item.x_stride);
    S::tiles_see_memory();
  }
  // Tiles that are narrower than a vector lie side by side, as in `pair_rows`; those of one row, one after another.
  const int apart = slots == 1 ? 4 : kTileBytes;
  const auto at = [&](int tile) {
    return out + (slots == 1 ? tile * kLanes : tile / together * kLanes * kLanes + tile % together * slots);
  };
  _tile_stored(0, at(0), apart);
  _tile_stored(1, at(1), apart);
  _tile_stored(2, at(2), apart);
  _tile_stored(3, at(3), apart);
  S::tiles_see_memory();
}

// Writes the sums of `tile_sums`, plus the bias, to rows of out from `row` on.
template <class S, int groups, int blocks>
void write_sums(const ProductItem& item, const float* sums, int slots, std::int64_t first, int row) {
  const int together = kLanes / slots;
  for (int tile = 0; tile < groups * blocks; tile += together, sums += kLanes * kLanes) {
    typename S::F lanes[kLanes];
    const int count = slots == 1 ? groups : kLanes;
    for (int i = 0; i < count; ++i) lanes[i] = S::load(sums + i * kLanes);
    if (slots > 1) S::transpose(lanes);
    for (int i = 0; i < count; ++i) {
      const int group = (tile + i / slots) / blocks, block = (tile + i / slots) % blocks;
      const int to = row + block * kLanes + i % slots, at = int(first) + group * kLanes;
      if (group >= groups || to >= item.rows || at >= item.last) continue;
      if (item.bias != nullptr)
        lanes[i] = S::add(lanes[i], load_lanes<S, Dtype::kBfloat>(item.bias, at, int(item.last)));
      store_lanes<S, Dtype::kBfloat>(item.out + to * item.out_stride, at, int(item.last), lanes[i]);
    }
  }
}

// Rows of x as `pair_rows` arranges them, 16 at a time and `x_stride` apart, times a range of rows of w. If there are
// more than 16 rows, 16 rows past the last may be read.
template <class S>
void paired_product_block(const ProductItem& item, std::byte*) {
  alignas(64) float sums[4 * kLanes * kLanes];
  const int slots = tile_slots(item.rows);
  const typename S::Tiles tiles(slots * 4);
  std::int64_t first = item.first;
  const auto outputs = [&](auto groups, auto blocks) __attribute__((always_inline)) {
    for (; first + groups * kLanes <= item.last || (groups == 1 && first < item.last); first += groups * kLanes) {
      for (int row = 0; row < item.rows; row += blocks * kLanes) {
        S::tiles_see_memory();
        tile_sums<S, groups, blocks>(item, item.x + row / kLanes * item.x_stride, slots, first, sums);
        write_sums<S, groups, blocks>(item, sums, slots, first, row);
      }
    }
  };
  if (item.rows > kLanes)
    outputs(Constant<2>{}, Constant<2>{});
  else
    outputs(Constant<4>{}, Constant<1>{});
  outputs(Constant<1>{}, Constant<1>{});
}

}  // namespace hack
