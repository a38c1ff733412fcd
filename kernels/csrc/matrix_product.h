// Matrix products in BF16 on a unit that multiplies whole tiles (AMX-BF16), with the rows of a weight as they rest.
//
// A tile of a weight is 16 of its rows and 32 columns, wherever they lie in memory. Only x is rewritten, once a call:
// in pairs of columns, [steps of 32 columns][16 pairs][rows][2], so that rows of x become columns of a tile. The unit
// forms a sum for every row of x alone, in steps of 32 columns: a row does not depend on the rows beside it.
// As for the library, numbers below the normal range count as 0.
#pragma once

#include "product.h"
#include "simd/amx.h"

namespace hack {

inline constexpr int kTileColumns = 32;  // of a weight, in a step
inline constexpr int kTileBytes = 64;    // of a row of a tile
inline constexpr int kTileGroups = 4;    // tiles of rows of a weight that are summed at once, to hide a sum's latency

// Rows of x in a tile, which so many `rows` take: 4, 8 or 16.
constexpr int tile_slots(std::int64_t rows) {
  return rows <= 4 ? 4 : rows <= 8 ? 8 : kLanes;
}

constexpr int tile_steps(int k) {
  return (k + kTileColumns - 1) / kTileColumns;
}

// Columns from `at` on of a row of n values in BF16, zeros past its end.
[[gnu::always_inline]] inline __m512i load_columns(const std::byte* row, int at, int n) {
  const std::byte* from = row + 2 * std::int64_t(at);
  if (at + kTileColumns <= n) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16(__mmask32((std::uint64_t(1) << (n - at)) - 1), from);
}

// `rows` rows of x in pairs. A turn of 16 vectors serves as many steps as fit beside one another.
template <class S>
void pair_rows(const std::byte* x, std::int64_t stride, int rows, int k, std::byte* out) {
  const int slots = tile_slots(rows), steps = tile_steps(k), together = kLanes / slots;
  for (int step = 0; step < steps; step += together, out += kPairBytes) {
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

// Up to 16 rows of x in pairs times rows of a weight from `first` on, 16 for each of `groups`, to sums of `out`.
template <class S, int groups>
[[gnu::always_inline]] inline void tile_sums(const ProductItem& item, const std::byte* pairs, int slots,
                                             std::int64_t first, float* out) {
  const int together = kLanes / slots;
  const std::int64_t stride = 2 * std::int64_t(item.k), rows = item.last - first;
  const std::byte* w = item.w + first * stride;
  _tile_zero(0);
  if constexpr (groups == kTileGroups) {
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const auto step = [&](int i, const std::byte* from, std::int64_t apart) __attribute__((always_inline)) {
    _tile_loadd(4, pairs + i / together * kPairBytes + i % together * slots * 4, kTileBytes);
    _tile_loadd(5, from, apart);
    _tile_dpbf16ps(0, 5, 4);
    if constexpr (groups == kTileGroups) {
      _tile_loadd(6, from + 16 * apart, apart);
      _tile_dpbf16ps(1, 6, 4);
      _tile_loadd(5, from + 32 * apart, apart);
      _tile_dpbf16ps(2, 5, 4);
      _tile_loadd(6, from + 48 * apart, apart);
      _tile_dpbf16ps(3, 6, 4);
    }
  };
  const int whole = rows >= groups * kLanes ? item.k / kTileColumns : 0;
  for (int i = 0; i < whole; ++i) step(i, w + std::int64_t(i) * kTileBytes, stride);
  for (int i = whole; i < tile_steps(item.k); ++i) {  // zeros where there is no weight
    alignas(64) std::byte padded[groups * kLanes * kTileBytes] = {};
    for (int n = 0; n < groups * kLanes && n < rows; ++n)
      _mm512_store_si512(padded + n * kTileBytes, load_columns(w + n * stride, i * kTileColumns, item.k));
    S::tiles_see_memory();
    step(i, padded, kTileBytes);
    S::tiles_see_memory();
  }
  // Tiles that are narrower than a vector lie side by side, as in `pair_rows`.
  const auto at = [&](int g) { return out + g / together * kLanes * kLanes + g % together * slots; };
  _tile_stored(0, at(0), kTileBytes);
  if constexpr (groups == kTileGroups) {
    _tile_stored(1, at(1), kTileBytes);
    _tile_stored(2, at(2), kTileBytes);
    _tile_stored(3, at(3), kTileBytes);
  }
  S::tiles_see_memory();
}

// Sums of `groups` tiles, plus the bias, to `rows` rows of out.
template <class S, int groups>
void write_sums(const ProductItem& item, const float* sums, int slots, std::int64_t first, int rows, std::byte* out) {
  const int together = kLanes / slots;
  for (int g = 0; g < groups; g += together, sums += kLanes * kLanes) {
    typename S::F lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = S::load(sums + i * kLanes);
    S::transpose(lanes);
    for (int i = 0; i < kLanes; ++i) {
      const int row = i % slots, at = int(first) + (g + i / slots) * kLanes;
      if (row >= rows || at >= item.last || g + i / slots >= groups) continue;
      if (item.bias != nullptr)
        lanes[i] = S::add(lanes[i], load_lanes<S, Dtype::kBfloat>(item.bias, at, int(item.last)));
      store_lanes<S, Dtype::kBfloat>(out + row * item.out_stride, at, int(item.last), lanes[i]);
    }
  }
}

// Rows of x that `pair_rows` has made, 16 at a time and `x_stride` apart, times a range of rows of w.
template <class S>
void paired_product_block(const ProductItem& item, std::byte*) {
  alignas(64) float sums[kTileGroups * kLanes * kLanes] = {};
  for (int row = 0; row < item.rows; row += kLanes) {
    const int rows = item.rows - row < kLanes ? item.rows - row : kLanes, slots = tile_slots(rows);
    const std::byte* pairs = item.x + row / kLanes * item.x_stride;
    std::byte* out = item.out + row * item.out_stride;
    const typename S::Tiles tiles(slots * 4);
    S::tiles_see_memory();
    const auto some = [&](auto groups, std::int64_t first) __attribute__((always_inline)) {
      tile_sums<S, groups>(item, pairs, slots, first, sums);
      write_sums<S, groups>(item, sums, slots, first, rows, out);
    };
    std::int64_t first = item.first;
    for (; first + kTileGroups * kLanes <= item.last; first += kTileGroups * kLanes)
      some(Constant<kTileGroups>{}, first);
    for (; first < item.last; first += kLanes) some(Constant<1>{}, first);
  }
}

}  // namespace hack
