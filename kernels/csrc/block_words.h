// Codes times rows all of whose blocks have two digits (block_tiles.h): products of words of 16 bits.
//
// A value of x is one word. A step multiplies two columns of 16 rows of a weight: columns 0 and 2, or 1 and 3, of four.
// In this order one shift and one mask turn a vector of codes into words.
#pragma once

#include "block_tiles.h"

namespace hack {

// Does what round_blocks does, in words: nearest(value / scale).
template <class S, Dtype dtype>
void round_words(const std::byte* row, int k, const BlockRows& out, std::int64_t at) {
  RowBlock* block = out.group_of(at);
  const int place = int(at % kLanes);
  for (int b = 0; b < k / kBlockColumns; ++b, ++block) {
    const BlockValues<S, dtype> values(row, b, k);
    const RoundedBlock<S> rounded(values, values.largest(), kLargestValue);
    for (int h = 0; h < 2; ++h) S::store_words(block->words[place] + h * kLanes, rounded.whole[h]);
    const std::int32_t sum = S::reduce_add_int(S::add_int(rounded.whole[0], rounded.whole[1]));
    block->scales[place] = rounded.scale;
    block->sums[place] = float(sum) * rounded.scale;
    block->starts[0][place] = -128 * sum;
  }
}

template <class S, int bits>
struct BlockWords {
  using Lanes = S;
  static constexpr int kBits = bits;
  static constexpr int kTiles = 1;
  static constexpr int kSteps = kBlockColumns / 2;
  static constexpr int kWideCodes = kBlockColumns * kLanes * 2;  // a word for each code

  static void widen(const std::byte* block, std::byte* codes) {
    unrolled<kSteps>([&](auto step) __attribute__((always_inline)) {
      S::store_int(codes + 64 * step, codes_of<false, step>(block));
    });
  }

  static void fetch(const RowBlock* x, int place) {
    for (int r = 0; r < S::kBlockRows; ++r) __builtin_prefetch(x->words[place + r]);
    __builtin_prefetch(x->scales + place);
    __builtin_prefetch(bits == 8 ? static_cast<const void*>(x->starts[0] + place) : x->sums + place);
  }

  // Does what BlockDigits::form_sums does.
  template <int R, int N, bool wide, class Take>
  [[gnu::always_inline]] static void form_sums(const std::byte* from, std::int64_t tile_bytes, const RowBlock& x,
                                               int place, Take take) {
    typename S::I sums[R * N];
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) {
      sums[i] = bits == 8 ? S::splat_int(x.starts[0][place + i / N]) : S::zero_int();
    });
    const std::int16_t* rows = x.words[place];
    unrolled<kSteps>([&](auto step) __attribute__((always_inline)) {
      typename S::I codes[N];
      unrolled<N>([&](auto n) __attribute__((always_inline)) {
        codes[n] = codes_of<wide, step>(from + n * tile_bytes);
      });
      unrolled<R>([&](auto r) __attribute__((always_inline)) {
        const auto two = S::broadcast_quad(rows + r * kBlockColumns + 2 * step);
        unrolled<N>([&](auto n) __attribute__((always_inline)) {
          sums[r * N + n] = S::word_dot(sums[r * N + n], codes[n], two);
        });
      });
    });
    unrolled<R * N>([&](auto i) __attribute__((always_inline)) { take(i, S::to_float(sums[i])); });
  }

 private:
  template <bool wide, int step>
  [[gnu::always_inline]] static typename S::I codes_of(const std::byte* block) {
    constexpr int quad = step / 2, odd = step % 2;
    if constexpr (wide) return S::load_int(block + 64 * step);
    else return S::template words<bits, (bits * (quad / bits) + 8 * odd)>(S::load_int(block + 64 * (quad % bits)));
  }
};

}  // namespace hack
