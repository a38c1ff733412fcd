// Products with weights that rest as codes (block_weight.py): blocks of 32 columns, 16 rows of a weight side by side.
//
// Rows of x are rounded to two bytes, with a scale for each block. Sums within a block are integers. Blocks are added in
// one order, with the product rounded before it is added. So every instruction set gives the same bits, whatever rows
// stand beside.
#pragma once

#include "rowwise.h"
#include "unrolled.h"

namespace hack {

inline constexpr float kSmallestBlock = 1e-30f;  // values of a block that are all smaller count as 0

// A row of k values -> nearest(value / scale) = 254 upper + lower, scale = largest / (127 * 254); and sums of a block's
// codes. A block that holds a value which is not finite has NaN as its scale.
template <class S, Dtype dtype>
void round_blocks(const std::byte* row, int k, const BlockRow& out) {
  for (int b = 0; b < k / kBlockColumns; ++b) {
    typename S::F x[2];
    for (int h = 0; h < 2; ++h) x[h] = load_lanes<S, dtype>(row, b * kBlockColumns + h * kLanes, k);
    const auto size = [](typename S::F y) { return S::max(y, S::sub(S::zero(), y)); };
    const float largest = S::reduce_max(S::max(size(x[0]), size(x[1])));
    const float faults = S::reduce_add(S::add(S::sub(x[0], x[0]), S::sub(x[1], x[1])));  // 0 or NaN
    const bool some = faults == 0.0f && largest > kSmallestBlock;
    out.scales[b] = largest / (127.0f * kUpperPart) + faults;
    out.sums[2 * b] = out.sums[2 * b + 1] = 0;
    const auto inverse = S::splat(some ? 127.0f * kUpperPart / largest : 0.0f);
    for (int h = 0; h < 2; ++h) {
      const auto whole = S::to_float(some ? S::nearest(S::mul(x[h], inverse)) : S::zero_int());
      const auto upper = S::nearest(S::mul(whole, S::splat(1.0f / kUpperPart)));
      const auto lower = S::nearest(S::sub(whole, S::mul(S::to_float(upper), S::splat(kUpperPart))));
      auto* codes = reinterpret_cast<std::uint8_t*>(out.codes) + 2 * b * kBlockColumns + h * kLanes;
      S::store_low_bytes(codes, upper);
      S::store_low_bytes(codes + kBlockColumns, lower);
      out.sums[2 * b] += S::reduce_add_int(upper);
      out.sums[2 * b + 1] += S::reduce_add_int(lower);
    }
  }
}

// Adds products of codes and x. The sums of a block are `block_total`: of (code - 128) x, or of code x with 4 bits.
template <class S, int bits>
[[gnu::always_inline]] inline typename S::I block_dot(typename S::I acc, typename S::I codes, typename S::I x) {
  if constexpr (S::kDotTakesBytes) return S::template dot<bits>(acc, codes, x);
  else return S::template block_dot<bits>(acc, codes, x);
}

template <class S, int bits>
[[gnu::always_inline]] inline typename S::I block_total(typename S::I acc, std::int32_t x_sum) {
  if constexpr (!S::kDotTakesBytes) return S::template block_total<bits>(acc);
  else return bits == 8 ? S::add_int(acc, S::splat_int(-128 * x_sum)) : acc;
}

// What codes of `bits` bits times a block of x add to sums in FP32.
template <class S, int bits>
typename S::F block_sum(typename S::I upper, typename S::I lower, const std::byte* after_codes, const BlockRow& x,
                        int b) {
  const auto* halves = reinterpret_cast<const std::uint16_t*>(after_codes);
  const auto scale = S::load_half(halves), row_scale = S::splat(x.scales[b]);
  const std::int32_t* x_sums = x.sums + 2 * b;
  const auto whole = S::add(S::mul(S::to_float(block_total<S, bits>(upper, x_sums[0])), S::splat(kUpperPart)),
                            S::to_float(block_total<S, bits>(lower, x_sums[1])));
  if constexpr (bits == 8) return S::mul(whole, S::mul(scale, row_scale));
  const auto offset = S::mul(S::splat(kUpperPart * float(x_sums[0]) + float(x_sums[1])), S::load_half(halves + kLanes));
  return S::mul(S::add(S::mul(whole, scale), offset), row_scale);
}

// R rows of x, from row `row` on, times N tiles of w.
template <class S, Dtype dtype, int bits, int R, int N>
void block_tile(const BlockItem& item, std::int64_t row, std::int64_t tile) {
  constexpr int kFields = 8 / bits, kCodes = kBlockColumns * kLanes * bits / 8;
  typename S::F totals[R * N];
  BlockRow x[R];
  unrolled<R>([&](auto r) __attribute__((always_inline)) { x[r] = item.x.row(row + r); });
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) { totals[i] = S::zero(); });
  const std::byte* block = item.w + tile * item.tile_bytes;
  for (int b = 0; b < item.x.blocks; ++b, block += block_bytes(bits)) {
    typename S::I sums[R * N * kBlockParts];
    unrolled<R * N * kBlockParts>([&](auto i) __attribute__((always_inline)) { sums[i] = S::zero_int(); });
    unrolled<8 / kFields>([&](auto quad) __attribute__((always_inline)) {
      typename S::I packed[N];
      unrolled<N>([&](auto n) __attribute__((always_inline)) {
        packed[n] = S::load_int(block + n * item.tile_bytes + 64 * quad);
      });
      unrolled<kFields>([&](auto f) __attribute__((always_inline)) {
        unrolled<R>([&](auto r) __attribute__((always_inline)) {
          unrolled<kBlockParts>([&](auto part) __attribute__((always_inline)) {
            const auto four = S::broadcast_quad(x[r].codes + (2 * b + part) * kBlockColumns + 16 * f + 4 * quad);
            unrolled<N>([&](auto n) __attribute__((always_inline)) {
              const auto codes = bits == 8 ? packed[n] : S::template plane<bits, f>(packed[n]);
              constexpr int at = (r * N + n) * kBlockParts + part;
              sums[at] = block_dot<S, bits>(sums[at], codes, four);
            });
          });
        });
      });
    });
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
      const std::byte* after_codes = block + (i % N) * item.tile_bytes + kCodes;
      totals[i] = S::add(totals[i], block_sum<S, bits>(sums[2 * i], sums[2 * i + 1], after_codes, x[i / N], b));
    });
  }
  unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
    const int at = int(tile + i % N) * kLanes;
    if (item.bias != nullptr) totals[i] = S::add(totals[i], load_lanes<S, dtype>(item.bias, at, item.outputs));
    store_lanes<S, dtype>(item.out + (row + i / N) * item.out_stride, at, item.outputs, totals[i]);
  });
}

// Some rows of x times N tiles of w.
template <class S, Dtype dtype, int bits, int R, int N>
std::int64_t block_rows(const BlockItem& item, std::int64_t row, std::int64_t tile) {
  for (; row + R <= item.last_row; row += R) block_tile<S, dtype, bits, R, N>(item, row, tile);
  return row;
}

template <class S, Dtype dtype, int bits>
void block_product(const BlockItem& item) {
  constexpr int R = S::kBlockRows, N = S::kBlockTiles, kAlone = S::kBlockTilesOfOneRow;
  std::int64_t tile = item.first_tile;
  const std::int64_t single = item.first_row + (item.last_row - item.first_row) / R * R;
  for (; tile + N <= item.last_tile; tile += N) block_rows<S, dtype, bits, R, N>(item, item.first_row, tile);
  for (; tile < item.last_tile; ++tile) block_rows<S, dtype, bits, R, 1>(item, item.first_row, tile);
  for (tile = item.first_tile; tile + kAlone <= item.last_tile; tile += kAlone)
    block_rows<S, dtype, bits, 1, kAlone>(item, single, tile);
  for (; tile < item.last_tile; ++tile) block_rows<S, dtype, bits, 1, 1>(item, single, tile);
}

template <class S, Dtype dtype>
void block_product_of(const BlockItem& item) {
  item.bits == 8 ? block_product<S, dtype, 8>(item) : block_product<S, dtype, 4>(item);
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
