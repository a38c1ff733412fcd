// AVX-512 beside a unit that multiplies whole tiles of 16 rows of 64 bytes (AMX).
#pragma once

#include "../unrolled.h"
#include "avx512.h"

namespace hack {

struct Amx : Avx512 {
  static constexpr const char* name = "avx512-amx";
  static constexpr int kLaneVectors = 2;  // as many as `lane_products` takes
  // While an object lives, the thread's tiles have 16 rows: tiles 0 to 5 rows of `row_bytes` bytes, the others of 64.
  // (The library's products configure tiles anew for each call.)
  class Tiles {
   public:
    explicit Tiles(int row_bytes) {
      alignas(64) struct {
        std::uint8_t palette = 1, start_row = 0, unused[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } shape;
      for (int i = 0; i <= 5; ++i) shape.row_bytes[i] = std::uint16_t(row_bytes);
      _tile_loadconfig(&shape);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
  };

  // While an object lives, tiles 4 and 5 have 16 rows of a block of x, tiles 6 and 7 a block of 16 rows of a weight in
  // quads, and the others 16 rows of 16 sums (block_matrix.h).
  class BlockTiles {
   public:
    BlockTiles() {
      alignas(64) struct {
        std::uint8_t palette = 1, start_row = 0, unused[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 32, 32, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 8, 8};
      } shape;
      _tile_loadconfig(&shape);
    }
    ~BlockTiles() { _tile_release(); }
    BlockTiles(const BlockTiles&) = delete;
    BlockTiles& operator=(const BlockTiles&) = delete;
  };

  struct WholeTiles : Tiles {
    WholeTiles() : Tiles(64) {}
  };

  // Tiles are loaded and stored behind the compiler's back.
  static void tiles_see_memory() { __asm__ volatile("" ::: "memory"); }

  // Products of a page with a tile of rows in lanes (lanes.h), 64 bytes of both at a time. Rows of the page are the
  // matrix unit's rows, so their number is a multiple of 16.
  struct Step {
    std::int64_t a;  // where a step's bytes begin in the page's first row
    std::int64_t b;  // where they begin in the tile, if it has one vector; times NV if it has NV
  };
  enum class Product { kCodes, kUnsignedCodes, kPairs };  // signed or unsigned bytes times signed ones; pairs in BF16

  // out [n, NV, 16] = Σ over steps of a [n, 64 bytes], rows `stride` bytes apart, · b [16, NV, 16 words]; += if `adds`.
  template <Product kind, int NV, bool adds>
  static void lane_products(const void* a, std::int64_t stride, int n, const Step* steps, int count, const void* b,
                            void* out) {
    static_assert(NV <= kLaneVectors);
    const auto* rows = static_cast<const std::byte*>(a);
    auto* to = static_cast<std::byte*>(out);
    tiles_see_memory();
    int i = 0;
    for (; i + 32 <= n; i += 32, rows += 32 * stride, to += 32 * NV * 64)
      some<kind, 2, NV, adds>(rows, stride, steps, count, static_cast<const std::byte*>(b), to);
    if (i < n) some<kind, 1, NV, adds>(rows, stride, steps, count, static_cast<const std::byte*>(b), to);
    tiles_see_memory();
  }

 private:
  // Sums are tiles 0 to 3, the tile's vectors 4 and 5, the page's rows 6 and 7.
  template <Product kind, int NI, int NV, bool adds>
  [[gnu::always_inline]] static void some(const std::byte* a, std::int64_t stride, const Step* steps, int count,
                                          const std::byte* b, std::byte* out) {
    constexpr int row = NV * 64, next = 16 * row;
    if constexpr (adds) {
      _tile_loadd(0, out, row);
      if constexpr (NV == 2) _tile_loadd(1, out + 64, row);
      if constexpr (NI == 2) _tile_loadd(2, out + next, row);
      if constexpr (NI == 2 && NV == 2) _tile_loadd(3, out + next + 64, row);
    } else {
      _tile_zero(0);
      if constexpr (NV == 2) _tile_zero(1);
      if constexpr (NI == 2) _tile_zero(2);
      if constexpr (NI == 2 && NV == 2) _tile_zero(3);
    }
    for (int i = 0; i < count; ++i) {
      const std::byte *rows = a + steps[i].a, *vectors = b + steps[i].b * NV;
      _tile_loadd(6, rows, stride);
      _tile_loadd(4, vectors, row);
      if constexpr (NV == 2) _tile_loadd(5, vectors + 64, row);
      if constexpr (NI == 2) _tile_loadd(7, rows + 16 * stride, stride);
      if constexpr (kind == Product::kCodes) {
        _tile_dpbssd(0, 6, 4);
        if constexpr (NV == 2) _tile_dpbssd(1, 6, 5);
        if constexpr (NI == 2) _tile_dpbssd(2, 7, 4);
        if constexpr (NI == 2 && NV == 2) _tile_dpbssd(3, 7, 5);
      } else if constexpr (kind == Product::kUnsignedCodes) {
        _tile_dpbusd(0, 6, 4);
        if constexpr (NV == 2) _tile_dpbusd(1, 6, 5);
        if constexpr (NI == 2) _tile_dpbusd(2, 7, 4);
        if constexpr (NI == 2 && NV == 2) _tile_dpbusd(3, 7, 5);
      } else {
        _tile_dpbf16ps(0, 6, 4);
        if constexpr (NV == 2) _tile_dpbf16ps(1, 6, 5);
        if constexpr (NI == 2) _tile_dpbf16ps(2, 7, 4);
        if constexpr (NI == 2 && NV == 2) _tile_dpbf16ps(3, 7, 5);
      }
    }
    _tile_stored(0, out, row);
    if constexpr (NV == 2) _tile_stored(1, out + 64, row);
    if constexpr (NI == 2) _tile_stored(2, out + next, row);
    if constexpr (NI == 2 && NV == 2) _tile_stored(3, out + next + 64, row);
  }
};

}  // namespace hack
