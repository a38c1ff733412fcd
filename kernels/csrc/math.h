// Exponential and the randomness of stochastic rounding on 16 lanes.
#pragma once

#include "page_format.h"
#include "unrolled.h"

namespace hack {

// Coefficients, from the highest power down to the first, of the minimax of 2^x on [0, 1] among polynomials with 1 at
// 0.
template <int degree>
inline constexpr float kExp2[degree] = {};
template <>
inline constexpr float kExp2<4>[4] = {1.342668553e-2f, 5.224247220e-2f, 2.412802057e-1f, 6.930448448e-1f};
template <>
inline constexpr float kExp2<5>[5] = {1.867130213e-3f, 9.017030019e-3f, 5.579991332e-2f, 2.401644501e-1f,
                                      6.931513118e-1f};

// factor * 2^x for finite x <= 0; relative error 3e-6 at degree 4, 2e-7 at degree 5.
template <class S, int degree = 5, int factor = 1>
[[gnu::always_inline]] inline typename S::F exp2(typename S::F x) {
  const auto rest = S::above_floor(x);
  auto y = S::splat(factor * kExp2<degree>[0]);
  unrolled<degree - 1>([&](auto i) { y = S::fma(y, rest, S::splat(factor * kExp2<degree>[i + 1])); });
  y = S::fma(y, rest, S::splat(float(factor)));
  return S::scale_by_floor(y, x);
}

// Philox4x32-10 with the seed as key: the key of every round.
struct RoundKeys {
  static constexpr int kRounds = 10;
  std::uint32_t a[kRounds];
  std::uint32_t b[kRounds];
};

template <class S>
RoundKeys round_keys(std::uint64_t seed) {
  RoundKeys keys;
  for (std::uint32_t i = 0; i < RoundKeys::kRounds; ++i) {
    keys.a[i] = std::uint32_t(seed) + i * 0x9E3779B9u;
    keys.b[i] = std::uint32_t(seed >> 32) + i * 0xBB67AE85u;
  }
  return keys;
}

// Uniform numbers in (0, 1) for kNoiseChannels channels of one token.
inline constexpr int kNoiseChannels = 2 * kLanes;

template <class S>
struct Noise {
  typename S::F k_low, k_high, v_low, v_high;  // 16 channels each
};

// The numbers of channels `channel`.. (a multiple of kNoiseChannels): four blocks of K and four of V; see philox.py.
template <class S>
[[gnu::always_inline]] inline Noise<S> noise(const RoundKeys& keys, int layer, int head, std::int64_t position,
                                             int channel) {
  using W = typename S::W;
  constexpr std::uint32_t factor_a = 0xD2511F53u, factor_b = 0xCD9E8D57u;
  const auto word = [](std::uint32_t x) { return S::splat_word(x); };
  // All blocks share three words of the counter, so the first round needs vectors for the last word only.
  const std::uint64_t first_a = std::uint64_t(factor_a) * std::uint32_t(layer);
  const std::uint64_t first_b = std::uint64_t(factor_b) * std::uint32_t(position);
  const std::uint32_t numbers = std::uint32_t(channel) / 4;  // 2 * (channel / 8), whose lower three bits are 0
  W c0 = word(std::uint32_t(first_b >> 32) ^ std::uint32_t(head) ^ keys.a[0]), c1 = word(std::uint32_t(first_b));
  W c2 = S::bit_xor(S::block_numbers(), word(numbers ^ std::uint32_t(first_a >> 32) ^ keys.b[0]));
  W c3 = word(std::uint32_t(first_a));
  unrolled<RoundKeys::kRounds - 1>([&](auto round) __attribute__((always_inline)) {
    const W a = S::multiply(c0, factor_a), b = S::multiply(c2, factor_b);
    c0 = S::bit_xor(S::bit_xor(S::upper(b), c1), word(keys.a[round + 1]));
    c2 = S::bit_xor(S::bit_xor(S::upper(a), c3), word(keys.b[round + 1]));
    c1 = b;
    c3 = a;
  });
  typename S::I shorts[4];
  S::shorts({c0, c1, c2, c3}, shorts);
  const auto uniform = [](typename S::I x) {
    return S::fma(S::to_float(x), S::splat(0x1p-16f), S::splat(0x1p-17f));  // exact
  };
  return {uniform(shorts[0]), uniform(shorts[1]), uniform(shorts[2]), uniform(shorts[3])};
}

}  // namespace hack
