// FP16 rows to levels, bit-equal to the definition in level_format.py. Lanes are tokens, so every sum takes the
// channels in the format's order. Two vectors of rows hide each other's latencies.
#pragma once

#include "arena.h"
#include "half.h"
#include "level_format.h"
#include "level_scales.h"
#include "unrolled.h"

namespace hack {

inline constexpr int kLevelFits = 3;
inline constexpr int kLevelRefits = 1;
inline constexpr float kTinyHalf = 0x1p-24f;
inline constexpr int kSealedVectors = 2;
inline constexpr int kSealedRows = kSealedVectors * kLanes;  // divides every page
inline constexpr float kFedUnit = 0x1p-11f;  // of sums of levels times gains: half a GAIN_STEP

// Channels of as many sums as registers hold.
template <class S>
inline constexpr int kFedChannels = S::kTileRows * S::kTileBlocks / kSealedVectors;

// Distance of levels with the least error for a normal variable of variance 1.
constexpr float level_step(int bits) {
  return bits == 2 ? 0.9957f : bits == 3 ? 0.586f : bits == 4 ? 0.3352f : 0.031f;
}

// The factor of a row's scale before its first codes under feedback.
constexpr float level_stretch(int bits) {
  return bits == 2 ? 1.1f : 1.0f;
}

// One number for each of kSealedRows rows. Numbers of all channels rest as [D][kSealedRows].
template <class S>
struct EachRow {
  typename S::F at[kSealedVectors];

  static EachRow load(const float* p) { return make([&](auto v) { return S::load(p + v * kLanes); }); }
  static EachRow splat(float x) { return make([&](auto) { return S::splat(x); }); }
  void store(float* p) const {
    unrolled<kSealedVectors>([&](auto v) __attribute__((always_inline)) { S::store(p + v * kLanes, at[v]); });
  }
  template <class Make>
  [[gnu::always_inline]] static EachRow make(Make make) {
    EachRow x;
    unrolled<kSealedVectors>([&](auto v) __attribute__((always_inline)) { x.at[v] = make(v); });
    return x;
  }
};

// n, where n + 1/2 is the level nearest to x.
template <class S, int bits>
[[gnu::always_inline]] inline typename S::I level_below(typename S::F x) {
  constexpr float most = zero_point(bits);
  return S::floor_int(S::max(S::min(x, S::splat(most - 0.5f)), S::splat(-most - 0.5f)));
}

template <class S, int bits>
[[gnu::always_inline]] inline typename S::F nearest_level(typename S::F x) {
  constexpr float most = zero_point(bits);
  return S::max(S::min(S::add(S::floor(x), S::splat(0.5f)), S::splat(most)), S::splat(-most));
}

// Rows [kSealedRows, D] -> x [D][kSealedRows].
template <class S>
void turn_rows(const std::uint16_t* rows, int d, float* x) {
  for (int v = 0; v < kSealedVectors; ++v) {
    for (int i = 0; i < d; i += kLanes) {
      typename S::F block[kLanes];
      for (int t = 0; t < kLanes; ++t) block[t] = S::load_half(rows + (v * kLanes + t) * d + i);
      S::transpose(block);
      for (int c = 0; c < kLanes; ++c) S::store(x + (i + c) * kSealedRows + v * kLanes, block[c]);
    }
  }
}

// A scale as the format holds it.
template <class S>
typename S::F stored_scale(const LevelFormat& fmt, typename S::F scale) {
  std::uint16_t half[kLanes];
  S::store_half(half, S::min(S::max(scale, S::splat(kTinyHalf)), S::splat(kMaxHalf)));
  if (fmt.narrow_scales)
    for (auto& h : half) h = half_of_byte(byte_of_half(h));
  return S::max(S::load_half(half), S::splat(kTinyHalf));
}

// The scale of every row of x [D][kSealedRows] by least squares.
template <class S, int bits>
EachRow<S> fit_scales(const float* x, int d) {
  const auto tiny = S::splat(kTinyHalf);
  EachRow<S> squares = EachRow<S>::splat(0.0f), scale;
  for (int i = 0; i < d; ++i) {
    const auto value = EachRow<S>::load(x + i * kSealedRows);
    for (int v = 0; v < kSealedVectors; ++v) squares.at[v] = S::fma(value.at[v], value.at[v], squares.at[v]);
  }
  alignas(64) float mean[kSealedRows];
  for (int v = 0; v < kSealedVectors; ++v) S::store(mean + v * kLanes, S::div(squares.at[v], S::splat(float(d))));
  for (float& m : mean) m = __builtin_sqrtf(m);
  for (int v = 0; v < kSealedVectors; ++v)
    scale.at[v] = S::max(S::mul(S::load(mean + v * kLanes), S::splat(level_step(bits))), tiny);
  for (int fit = 0; fit < kLevelFits; ++fit) {
    EachRow<S> steps, dots = EachRow<S>::splat(0.0f), norm = dots;
    for (int v = 0; v < kSealedVectors; ++v) steps.at[v] = S::div(S::splat(1.0f), scale.at[v]);
    for (int i = 0; i < d; ++i) {
      const auto value = EachRow<S>::load(x + i * kSealedRows);
      unrolled<kSealedVectors>([&](auto v) __attribute__((always_inline)) {
        const auto level = nearest_level<S, bits>(S::mul(value.at[v], steps.at[v]));
        dots.at[v] = S::fma(level, value.at[v], dots.at[v]);
        norm.at[v] = S::fma(level, level, norm.at[v]);
      });
    }
    for (int v = 0; v < kSealedVectors; ++v) scale.at[v] = S::max(S::div(dots.at[v], norm.at[v]), tiny);
  }
  return scale;
}

// b of rows x [D][kSealedRows]: step 4 of level_format.py.
template <class S>
void feed_rows(const float* gains, int d, const float* x, float* felt) {
  constexpr int kBlock = kFedChannels<S>;
  for (int first = d - kBlock; first >= 0; first -= kBlock) {
    const float* block = gains + first / kGainBlock * kGainBlock * std::size_t(d) + first % kGainBlock;
    EachRow<S> sums[kBlock];
    unrolled<kBlock>([&](auto c) __attribute__((always_inline)) { sums[c] = EachRow<S>::splat(0.0f); });
    const auto feed = [&](int i, const EachRow<S>& value, auto c) __attribute__((always_inline)) {
      const auto gain = S::splat(block[i * kGainBlock + c]);
      unrolled<kSealedVectors>([&](auto v) __attribute__((always_inline)) {
        sums[c].at[v] = S::fma(gain, value.at[v], sums[c].at[v]);
      });
    };
    for (int i = d - 1; i >= first + kBlock; --i) {
      const auto value = EachRow<S>::load(x + i * kSealedRows);
      unrolled<kBlock>([&](auto c) __attribute__((always_inline)) { feed(i, value, c); });
    }
    unrolled<kBlock>([&](auto back) __attribute__((always_inline)) {
      constexpr int c = kBlock - 1 - back;
      const int i = first + c;
      const auto value = EachRow<S>::load(x + i * kSealedRows);
      EachRow<S>::make([&](auto v) { return S::add(sums[c].at[v], value.at[v]); }).store(felt + i * kSealedRows);
      unrolled<c>([&](auto before) __attribute__((always_inline)) { feed(i, value, before); });
    });
  }
}

// One integer for each of kSealedRows rows. It holds twice the levels of a pair of channels, as two words of 16 bits,
// that of the even channel below; or a sum of products with such words.
template <class S>
struct EachInt {
  typename S::I at[kSealedVectors];

  static EachInt load(const std::int32_t* p) { return make([&](auto v) { return S::load_int(p + v * kLanes); }); }
  static EachInt zero() { return make([](auto) { return S::zero_int(); }); }
  static EachInt join(const EachInt& even, const EachInt& odd) {
    return make([&](auto v) { return S::word_pairs(even.at[v], odd.at[v]); });
  }
  void store(std::int32_t* p) const {
    unrolled<kSealedVectors>([&](auto v) __attribute__((always_inline)) { S::store_int(p + v * kLanes, at[v]); });
  }
  // Adds the products of a pair's levels with the gains of its channels.
  [[gnu::always_inline]] void feed(const EachInt& levels, std::int32_t pair_gain) {
    const auto gain = S::splat_int(pair_gain);
    unrolled<kSealedVectors>([&](auto v) __attribute__((always_inline)) {
      at[v] = S::word_dot(at[v], levels.at[v], gain);
    });
  }
  template <class Make>
  [[gnu::always_inline]] static EachInt make(Make make) {
    EachInt x;
    unrolled<kSealedVectors>([&](auto v) __attribute__((always_inline)) { x.at[v] = make(v); });
    return x;
  }
};

// Rounds channels one after another (step 5 of level_format.py), and sums what step 6 needs.
template <class S, int bits, bool refit>
struct FedRows {
  const float* felt;     // [D][kSealedRows]: b
  const float* weights;  // [D]
  float* levels;         // [D][kSealedRows], unless `refit`
  EachRow<S> steps, dots = EachRow<S>::splat(0.0f), norm = EachRow<S>::splat(0.0f);

  // Rounds channel i, where `sums` holds the products of the channels after it. Returns twice its levels.
  [[gnu::always_inline]] EachInt<S> round(int i, const EachInt<S>& sums) {
    return EachInt<S>::make([&](auto v) __attribute__((always_inline)) {
      const int at = i * kSealedRows + v * kLanes;
      const auto wanted = S::load(felt + at), sum = S::to_float(sums.at[v]);
      const auto below = level_below<S, bits>(S::fma(sum, S::splat(-kFedUnit), S::mul(wanted, steps.at[v])));
      const auto level = S::add(S::to_float(below), S::splat(0.5f));
      if constexpr (refit) {
        const auto whole = S::fma(sum, S::splat(kFedUnit), level), weighted = S::mul(S::splat(weights[i]), whole);
        dots.at[v] = S::add(dots.at[v], S::mul(weighted, wanted));
        norm.at[v] = S::add(norm.at[v], S::mul(weighted, whole));
      } else {
        S::store(levels + at, level);
      }
      return S::add_int(S::add_int(below, below), S::splat_int(1));
    });
  }
};

// Levels of rows by their scales: step 5 of level_format.py, where b is `felt` [D][kSealedRows]. With `refit`, the
// scales then become those that fit the levels best (step 6); without, the levels are stored. Sums of levels are exact,
// so they are sums of integers, of the pairs in `words` [D/2][kSealedRows].
template <class S, int bits, bool refit>
void round_under_feedback(const LevelFormat& fmt, const Feedback& feedback, const float* felt, EachRow<S>& scale,
                          std::int32_t* words, float* levels) {
  using Ints = EachInt<S>;
  constexpr int kBlock = kFedChannels<S>;
  const int d = fmt.head_dim;
  const auto steps = EachRow<S>::make([&](auto v) { return S::div(S::splat(1.0f), scale.at[v]); });
  FedRows<S, bits, refit> rows{felt, feedback.weights, levels, steps};
  for (int first = d - kBlock; first >= 0; first -= kBlock) {
    const std::int32_t* gains =
        feedback.pair_gains + first / kGainBlock * kGainBlock * std::size_t(d / 2) + first % kGainBlock;
    Ints sums[kBlock];
    unrolled<kBlock>([&](auto c) __attribute__((always_inline)) { sums[c] = Ints::zero(); });
    const auto feed = [&](int pair, const Ints& value, auto c) __attribute__((always_inline)) {
      sums[c].feed(value, gains[pair * kGainBlock + c]);
    };
    for (int pair = d / 2 - 1; pair >= (first + kBlock) / 2; --pair) {
      const Ints value = Ints::load(words + pair * kSealedRows);
      unrolled<kBlock>([&](auto c) __attribute__((always_inline)) { feed(pair, value, c); });
    }
    unrolled<kBlock / 2>([&](auto back) __attribute__((always_inline)) {
      constexpr int even = kBlock - 2 - 2 * back, odd = even + 1;
      const int pair = (first + even) / 2;
      const Ints upper = rows.round(first + odd, sums[odd]);
      feed(pair, Ints::join(Ints::zero(), upper), std::integral_constant<int, even>{});
      const Ints both = Ints::join(rows.round(first + even, sums[even]), upper);
      both.store(words + pair * kSealedRows);
      unrolled<even>([&](auto c) __attribute__((always_inline)) { feed(pair, both, c); });
    });
  }
  if constexpr (refit)
    for (int v = 0; v < kSealedVectors; ++v)
      scale.at[v] = stored_scale<S>(fmt, S::div(rows.dots.at[v], rows.norm.at[v]));
}

// Levels of rows x [D][kSealedRows] under `feedback`, in place, and their scales.
template <class S, int bits>
void feed_levels_back(const LevelFormat& fmt, const Feedback& feedback, float* x, EachRow<S>& scale, Arena<S> arena) {
  const std::size_t values = std::size_t(fmt.head_dim) * kSealedRows;
  float* felt = arena.template take<float>(values);
  std::int32_t* words = arena.template take<std::int32_t>(values / 2);
  feed_rows<S>(feedback.gains, fmt.head_dim, x, felt);
  for (int refit = 0; refit < kLevelRefits; ++refit)
    round_under_feedback<S, bits, true>(fmt, feedback, felt, scale, words, nullptr);
  round_under_feedback<S, bits, false>(fmt, feedback, felt, scale, words, x);
}

template <class S, int bits>
[[gnu::always_inline]] inline typename S::I code_of(typename S::F level) {
  return S::truncate(S::add(level, S::splat(zero_point(bits))));
}

// Levels [D][kSealedRows] of tokens t.. of K to the native order of a plane: the lower `width` bits of every code.
template <class S, int bits, int width>
void pack_k_levels(const PageFormat& fmt, int t, const float* levels, std::uint8_t* plane) {
  constexpr int kChunk = chunk_of(width);
  for (int v = 0; v < kSealedVectors; ++v) {
    std::uint8_t* out = plane + (t / kLanes + v) * (fmt.head_dim / kChunk) * kVectorBytes;
    for (int d = 0; d < fmt.head_dim; d += kChunk, out += kVectorBytes) {
      auto word = S::zero_int();
      for (int e = 0; e < kChunk; ++e) {
        const auto code = code_of<S, bits>(S::load(levels + (d + e) * kSealedRows + v * kLanes));
        const int shift = 8 * (e % kQuad) + width * (e / kQuad);
        word = S::add_int(word, S::shift_left(S::template plane<width, 0>(code), shift));
      }
      S::store_int(out, word);
    }
  }
}

// The highest bits of K in 3 bits. Each vector of rows has one half of every byte.
template <class S>
void pack_k_highest(const PageFormat& fmt, int t, const float* levels, std::uint8_t* plane) {
  static_assert(kSealedVectors == 2);
  std::uint8_t* out = plane + t / kSealedRows * (fmt.head_dim / kLanes) * kVectorBytes;
  for (int d = 0; d < fmt.head_dim; d += kLanes, out += kVectorBytes) {
    auto word = S::zero_int();
    for (int e = 0; e < kLanes; ++e) {
      for (int v = 0; v < kSealedVectors; ++v) {
        const auto code = code_of<S, 3>(S::load(levels + (d + e) * kSealedRows + v * kLanes));
        const int shift = 8 * (e % kQuad) + e / kQuad + 4 * v;
        word = S::add_int(word, S::shift_left(S::template plane<1, 2>(code), shift));
      }
    }
    S::store_int(out, word);
  }
}

// Levels of V to `field` of every code; lanes become channels.
template <class S, int bits, int width, int field>
void pack_v_levels(const PageFormat& fmt, int t, const float* levels, std::uint8_t* plane) {
  constexpr int kChunk = chunk_of(width), kWords = kSealedRows / kChunk;
  for (int d = 0; d < fmt.head_dim; d += kLanes) {
    typename S::I words[kWords];
    for (auto& word : words) word = S::zero_int();
    for (int v = 0; v < kSealedVectors; ++v) {
      typename S::F block[kLanes];
      for (int c = 0; c < kLanes; ++c) block[c] = S::load(levels + (d + c) * kSealedRows + v * kLanes);
      S::transpose(block);
      for (int row = 0; row < kLanes; ++row) {
        const int token = v * kLanes + row, e = token % kChunk, shift = 8 * (e % kQuad) + width * (e / kQuad);
        const auto code = S::template plane<width, field>(code_of<S, bits>(block[row]));
        words[token / kChunk] = S::add_int(words[token / kChunk], S::shift_left(code, shift));
      }
    }
    std::uint8_t* out = plane + (d / kLanes * (fmt.page_tokens / kChunk) + t / kChunk) * kVectorBytes;
    for (int w = 0; w < kWords; ++w) S::store_int(out + w * kVectorBytes, words[w]);
  }
}

// One page of rows [Π, D] of K or V to its planes.
template <class S, int bits, bool of_k>
void quantize_levels(const LevelFormat& fmt, const std::uint16_t* rows, const Feedback& feedback,
                     const BasicLevels<std::uint8_t>& to, Arena<S> arena) {
  const int d = fmt.head_dim;
  float* x = arena.template take<float>(std::size_t(d) * kSealedRows);
  for (int t = 0; t < fmt.page_tokens; t += kSealedRows) {
    turn_rows<S>(rows + std::size_t(t) * d, d, x);
    EachRow<S> scale = fit_scales<S, bits>(x, d);
    const auto stretch = S::splat(feedback.gains == nullptr ? 1.0f : level_stretch(bits));
    for (auto& each : scale.at) each = stored_scale<S>(fmt, S::mul(each, stretch));
    if (feedback.gains == nullptr) {
      const auto steps = EachRow<S>::make([&](auto v) { return S::div(S::splat(1.0f), scale.at[v]); });
      for (int i = 0; i < d; ++i) {
        const auto value = EachRow<S>::load(x + i * kSealedRows);
        EachRow<S>::make([&](auto v) { return nearest_level<S, bits>(S::mul(value.at[v], steps.at[v])); })
            .store(x + i * kSealedRows);
      }
    } else {
      feed_levels_back<S, bits>(fmt, feedback, x, scale, arena);
    }
    for (int v = 0; v < kSealedVectors; ++v) store_row_scales<S>(fmt, to.scale, t + v * kLanes, scale.at[v]);
    constexpr auto pack = of_k ? pack_k_levels<S, bits, low_bits(bits)> : pack_v_levels<S, bits, low_bits(bits), 0>;
    pack(fmt, t, x, to.codes);
    if constexpr (bits == 3) (of_k ? pack_k_highest<S> : pack_v_levels<S, 3, 1, 2>)(fmt, t, x, to.high);
  }
}

}  // namespace hack
