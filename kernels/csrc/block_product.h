// What products with weights that rest as codes (block_weight.py) have in common: rows of x and scales of a weight. A
// weight has blocks of 32 columns, and 16 rows side by side. block_tiles.h multiplies with vectors, block_matrix.h with a
// unit for matrices.
//
// Values of x are rounded to one or two bytes, with a scale for each block. Sums within a block are integers. Blocks
// are added in one order, each with one rounding. So every instruction set gives the same bits, and a row does not
// depend on the rows beside it.
#pragma once

#include "rowwise.h"
#include "unrolled.h"

namespace hack {

inline constexpr float kSmallestBlock = 1e-30f;  // values of a block that are all smaller count as 0

// Block b of a row of k values.
template <class S, Dtype dtype>
struct BlockValues {
  [[gnu::always_inline]] BlockValues(const std::byte* row, int b, int k) {
    for (int h = 0; h < 2; ++h) x[h] = load_lanes<S, dtype>(row, b * kBlockColumns + h * kLanes, k);
  }

  [[gnu::always_inline]] float largest() const {
    const auto size = [](typename S::F y) { return S::max(y, S::sub(S::zero(), y)); };
    return S::reduce_max(S::max(size(x[0]), size(x[1])));
  }

  // 0, or NaN if a value is not finite.
  [[gnu::always_inline]] float faults() const {
    return S::reduce_add(S::add(S::sub(x[0], x[0]), S::sub(x[1], x[1])));
  }

  typename S::F x[2];
};

// 32 values of x in whole units; the largest value has `levels` units. `scale` is the value of 1 in the lower digit, or
// NaN if a value is not finite.
template <class S>
struct RoundedBlock {
  template <Dtype dtype>
  [[gnu::always_inline]] RoundedBlock(const BlockValues<S, dtype>& values, float largest, float levels) {
    const float faults = values.faults();
    const bool some = faults == 0.0f && largest > kSmallestBlock;
    const auto inverse = S::splat(some ? levels / largest : 0.0f);
    for (int h = 0; h < 2; ++h) whole[h] = some ? S::nearest(S::mul(values.x[h], inverse)) : S::zero_int();
    scale = largest / kLargestValue + faults;
  }

  typename S::I whole[2];
  float scale;
};

// The size above which a block's largest value stands out of a row of k values. Each block's scale is set to its
// largest value, for later use.
template <class S, Dtype dtype>
float standing_out(const std::byte* row, int k, RowBlock* block, int place) {
  float total = 0.0f;  // summed one by one, so that every instruction set comes to the same result
  const int blocks = k / kBlockColumns;
  for (int b = 0; b < blocks; ++b) {
    block[b].scales[place] = BlockValues<S, dtype>(row, b, k).largest();
    total += block[b].scales[place];
  }
  return total * (kStandsOut / float(blocks));
}

// Rounds a row of k values, for a product with codes of `bits` bits, to row `at` of `out`. A value becomes two digits:
// 254 upper + lower.
template <class S, Dtype dtype>
void round_blocks(const std::byte* row, int k, int bits, const BlockRows& out, std::int64_t at) {
  RowBlock* block = out.group_of(at);
  const int place = int(at % kLanes);
  const bool coarse = rounds_coarsely(dtype, bits);
  const float most = coarse ? standing_out<S, dtype>(row, k, block, place) : 0.0f;
  for (int b = 0; b < k / kBlockColumns; ++b, ++block) {
    const BlockValues<S, dtype> values(row, b, k);
    const float largest = coarse ? block->scales[place] : values.largest();
    const bool fine = !coarse || largest > most;
    const RoundedBlock<S> rounded(values, largest, fine ? kLargestValue : kLargestDigit);
    typename S::I digits[kRowBytes][2];
    for (int h = 0; h < 2; ++h) {
      digits[0][h] = rounded.whole[h];
      digits[1][h] = S::zero_int();
      if (!fine) continue;
      const auto whole = S::to_float(rounded.whole[h]);
      digits[0][h] = S::nearest(S::mul(whole, S::splat(1.0f / kDigitBase)));
      digits[1][h] = S::nearest(S::sub(whole, S::mul(S::to_float(digits[0][h]), S::splat(kDigitBase))));
    }
    std::int32_t sums[kRowBytes] = {};
    for (int i = 0; i < kRowBytes; ++i) {
      for (int h = 0; h < 2; ++h)
        S::store_low_bytes(reinterpret_cast<std::uint8_t*>(block->codes[i][place] + h * kLanes), digits[i][h]);
      if (i == 0 || fine) sums[i] = S::reduce_add_int(S::add_int(digits[i][0], digits[i][1]));
    }
    block->scales[place] = rounded.scale;
    block->sums[place] = (kDigitBase * float(sums[0]) + float(sums[1])) * rounded.scale;
    block->fine[place] = fine;
    for (int i = 0; i < kRowBytes; ++i) block->starts[i][place] = -128 * sums[i];
  }
}

// Scales and, for 4 bits, minima of a block of 16 rows.
template <class S, int bits>
struct BlockScales {
  explicit BlockScales(const std::byte* after_codes) {
    const auto* halves = reinterpret_cast<const std::uint16_t*>(after_codes);
    scale = S::load_half(halves);
    if constexpr (bits == 4) minimum = S::load_half(halves + kLanes);
  }
  explicit BlockScales(const float* numbers) {
    scale = S::load(numbers);
    if constexpr (bits == 4) minimum = S::load(numbers + kLanes);
  }
  void store(float* numbers) const {
    S::store(numbers, scale);
    if constexpr (bits == 4) S::store(numbers + kLanes, minimum);
  }

  // total plus the share of one block: its sums for a row of x, scaled.
  [[gnu::always_inline]] typename S::F add(typename S::F total, typename S::F sums, const RowBlock& x, int row) const {
    total = S::fused(sums, S::mul(scale, S::splat(x.scales[row])), total);
    if constexpr (bits == 4) total = S::fused(minimum, S::splat(x.sums[row]), total);
    return total;
  }

  static constexpr int kNumbers = (bits == 4 ? 2 : 1) * kLanes;  // that `store` writes
  typename S::F scale;
  typename S::F minimum;
};

// Writes the sums of a row of x and a tile of w, plus the bias, to the result.
template <class S, Dtype dtype>
[[gnu::always_inline]] inline void write_block(const BlockItem& item, std::int64_t row, std::int64_t tile,
                                               typename S::F total) {
  const int at = int(tile) * kLanes;
  if (item.bias != nullptr) total = S::add(total, load_lanes<S, dtype>(item.bias, at, item.outputs));
  store_lanes<S, dtype>(item.out + row * item.out_stride, at, item.outputs, total);
}

// Row `row` of a weight, as numbers.
template <class S, Dtype dtype, int bits>
void unpack_row(const BlockItem& item, std::int64_t row, std::byte* out) {
  const int lane = int(row % kLanes), k = item.x.blocks * kBlockColumns;
  const std::byte* block = item.w + row / kLanes * item.tile_bytes;
  for (int b = 0; b < item.x.blocks; ++b, block += block_bytes(bits)) {
    std::uint8_t codes[4 * bits];
    unrolled<bits>([&](auto quad) __attribute__((always_inline)) {
      std::memcpy(codes + 4 * quad, block + 64 * quad + 4 * lane, 4);
    });
    const auto* halves = reinterpret_cast<const std::uint16_t*>(block + 64 * bits) + lane;
    const auto scale = S::splat(half_to_float(halves[0]));
    unrolled<2>([&](auto h) __attribute__((always_inline)) {
      typename S::F values;
      if constexpr (bits == 8) {
        const auto whole = S::bytes_to_float(S::load_bytes(codes + h * kLanes));
        values = S::mul(S::sub(whole, S::splat(128.0f)), scale);
      } else {
        const auto whole = S::bytes_to_float(S::template byte_field<bits>(S::load_bytes(codes), bits * h));
        values = S::add(S::mul(whole, scale), S::splat(half_to_float(halves[kLanes])));
      }
      store_lanes<S, dtype>(out, b * kBlockColumns + h * kLanes, k, values);
    });
  }
}

template <class S, Dtype dtype>
void unpack_row_of(const BlockItem& item, std::int64_t row, std::byte* out) {
  item.bits == 8 ? unpack_row<S, dtype, 8>(item, row, out) : unpack_row<S, dtype, 4>(item, row, out);
}

}  // namespace hack
