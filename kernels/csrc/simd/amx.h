// AVX-512 beside a unit that multiplies whole tiles of 16 rows of 64 bytes (AMX).
#pragma once

#include "../unrolled.h"
#include "avx512.h"

namespace hack {

struct Amx : Avx512 {
  // While it lives, the thread's tiles have 16 rows; the library's products shape them anew for each call. Tiles 0 to 5
  // have rows of so many bytes, the others of 64.
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

  // While it lives, tiles 4 and 5 have 16 rows of a block of x, tiles 6 and 7 a block of 16 rows of a weight in quads,
  // and the others 16 rows of 16 sums (block_matrix.h).
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

  // Tiles are loaded and stored behind the compiler's back.
  static void tiles_see_memory() { __asm__ volatile("" ::: "memory"); }

  // Multiplies kLanes rows at once.
  class Matrix : Tiles {
   public:
    Matrix() : Tiles(64) {}

    // Whether it takes rows of so many quads.
    static constexpr bool takes(int quads) { return quads % kRows == 0; }

    // dots [16, lanes] = 16 rows of signed bytes, `stride` apart, · codes [quads][blocks of 16 lanes][4] (`WidePage`).
    static void dots(const std::uint8_t* rows, int stride, const std::uint8_t* codes, int blocks, int quads,
                     std::int32_t* out) {
      tiles_see_memory();
      int b = 0;
      for (; b + 4 <= blocks; b += 4) some<4>(rows, stride, codes + b * kBytes, blocks, quads, out + b * kRows);
      for (; b < blocks; ++b) some<1>(rows, stride, codes + b * kBytes, blocks, quads, out + b * kRows);
      tiles_see_memory();
    }

   private:
    static constexpr int kRows = 16, kBytes = 64;  // of a tile

    // For `count` blocks at once, whose sums are tiles 0, 1, ..; rows are tile 4.
    template <int count>
    [[gnu::always_inline]] static void some(const std::uint8_t* rows, int stride, const std::uint8_t* codes, int blocks,
                                            int quads, std::int32_t* out) {
      _tile_zero(0);
      if constexpr (count == 4) {
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int j = 0; j < quads; j += kRows, rows += kBytes, codes += kRows * blocks * kBytes) {
        _tile_loadd(4, rows, stride);
        _tile_loadd(5, codes, blocks * kBytes);
        _tile_dpbsud(0, 4, 5);
        if constexpr (count == 4) {
          _tile_loadd(6, codes + kBytes, blocks * kBytes);
          _tile_dpbsud(1, 4, 6);
          _tile_loadd(5, codes + 2 * kBytes, blocks * kBytes);
          _tile_dpbsud(2, 4, 5);
          _tile_loadd(6, codes + 3 * kBytes, blocks * kBytes);
          _tile_dpbsud(3, 4, 6);
        }
      }
      const int row_bytes = blocks * kBytes;
      _tile_stored(0, out, row_bytes);
      if constexpr (count == 4) {
        _tile_stored(1, out + kRows, row_bytes);
        _tile_stored(2, out + 2 * kRows, row_bytes);
        _tile_stored(3, out + 3 * kRows, row_bytes);
      }
    }
  };
};

}  // namespace hack
