// Products with weights that rest as codes of 8 bits, on units that multiply words of 16 bits (AVX2): the bits of
// block_product.h.
//
// A value of x is one word, not two bytes. A step multiplies two columns of 16 rows of a weight, columns 0 and 2 or 1 and
// 3 of four: so a shift and a mask make words of a vector of codes. Where a tile of a weight meets many rows of x, its
// words are made once.
#pragma once

#include "block_product.h"

namespace hack {

inline constexpr int kSteps = kBlockColumns / 2;            // of a block
inline constexpr int kWordRows = 4;                         // rows of x at a time, of one group
inline constexpr int kWideBlock = kSteps * kLanes * 2 * 2;  // bytes of a block of a tile, as words
static_assert(block_scratch_bytes(1) >= kWideBlock);

// As round_blocks: nearest(value / scale), in words.
template <class S, Dtype dtype>
void round_words(const std::byte* row, int k, const BlockRows& out, std::int64_t at) {
  RowBlock* block = out.group_of(at);
  const int place = int(at % kLanes);
  for (int b = 0; b < k / kBlockColumns; ++b, ++block) {
    const BlockValues<S, dtype> values(row, b, k);
    const RoundedBlock<S> rounded(values, values.largest(), kLargestValue);
    for (int h = 0; h < 2; ++h) S::store_words(block->words[place] + h * kLanes, rounded.whole[h]);
    block->scales[place] = rounded.scale;
    block->starts[0][place] = -128 * S::reduce_add_int(S::add_int(rounded.whole[0], rounded.whole[1]));
  }
}

// Words of step `step` of a block: of codes as they rest, or made before.
template <class S, bool wide, int step>
[[gnu::always_inline]] inline typename S::I step_words(const std::byte* block) {
  constexpr int quad = step / 2;
  constexpr bool odd = step % 2 != 0;
  if constexpr (wide) return S::load_int(block + 64 * step);
  else return S::template words<odd>(S::load_int(block + 64 * quad));
}

// R rows of x, from row `row` on, of one group, times N tiles of w from `tile` on. `words`: of the tile, or null.
template <class S, Dtype dtype, int R, int N, bool wide>
void word_tile(const BlockItem& item, std::int64_t row, std::int64_t tile, const std::byte* words) {
  static_assert(!wide || N == 1);
  typename S::F totals[R * N];
  const RowBlock* x = item.x.group_of(row);
  const int place = int(row % kLanes);
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) { totals[i] = S::zero(); });
  const std::byte* block = item.w + tile * item.tile_bytes;
  for (int b = 0; b < item.x.blocks; ++b, ++x, block += block_bytes(8), words += wide ? kWideBlock : 0) {
    typename S::I sums[R * N];
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
      sums[i] = S::splat_int(x->starts[0][place + i / N]);
    });
    const std::int16_t* rows = x->words[place];
    unrolled<kSteps>([&](auto step) __attribute__((always_inline)) {
      typename S::I codes[N];
      unrolled<N>([&](auto n) __attribute__((always_inline)) {
        codes[n] = step_words<S, wide, step>(wide ? words : block + n * item.tile_bytes);
      });
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        const auto two = S::broadcast_quad(rows + r * kBlockColumns + 2 * step);
        unrolled<N>([&](auto n) __attribute__((always_inline)) {
          sums[r * N + n] = S::word_dot(sums[r * N + n], codes[n], two);
        });
      });
    });
    unrolled<N>([&](auto n) __attribute__((always_inline)) {
      const BlockScales<S, 8> scales(block + n * item.tile_bytes + kLanes * kBlockColumns);
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

// Words of a tile of w.
template <class S>
void make_words(const BlockItem& item, std::int64_t tile, std::byte* words) {
  const std::byte* block = item.w + tile * item.tile_bytes;
  for (int b = 0; b < item.x.blocks; ++b, block += block_bytes(8), words += kWideBlock) {
    unrolled<kSteps>([&](auto step) __attribute__((always_inline)) {
      S::store_int(words + 64 * step, step_words<S, false, step>(block));
    });
  }
}

// Rows of x, R at a time from `row` on, times a tile of w; returns the first row that is left. `words`: of the tile, or
// null.
template <class S, Dtype dtype, int R, bool wide>
std::int64_t word_rows(const BlockItem& item, std::int64_t row, std::int64_t tile, const std::byte* words) {
  for (; row + R <= item.last_row; row += R) word_tile<S, dtype, R, 1, wide>(item, row, tile, words);
  return row;
}

template <class S, Dtype dtype>
void word_product_of(const BlockItem& item, std::byte* scratch) {
  const bool wide = item.last_row - item.first_row >= kLanes;
  std::int64_t single = item.first_row;
  for (std::int64_t tile = item.first_tile; tile < item.last_tile; ++tile) {
    std::int64_t row = item.first_row;
    if (wide) {
      make_words<S>(item, tile, scratch);
      row = word_rows<S, dtype, kWordRows, true>(item, row, tile, scratch);
    } else {
      row = word_rows<S, dtype, kWordRows, false>(item, row, tile, nullptr);
    }
    single = word_rows<S, dtype, 2, false>(item, row, tile, nullptr);
  }
  if (single == item.last_row) return;
  std::int64_t tile = item.first_tile;
  for (; tile + 2 <= item.last_tile; tile += 2) word_tile<S, dtype, 1, 2, false>(item, single, tile, nullptr);
  if (tile < item.last_tile) word_tile<S, dtype, 1, 1, false>(item, single, tile, nullptr);
}

}  // namespace hack
