// Exponential and the randomness of stochastic rounding on 16 lanes.
#pragma once

#include "format.h"
#include "unrolled.h"

namespace hack {

// factor * 2^x for finite x <= 0; relative error 2e-7. The polynomial is the minimax of degree 5 on [-1/2, 1/2].
template <class S, int factor = 1>
[[gnu::always_inline]] inline typename S::F exp2(typename S::F x) {
  const auto whole = S::round(x);
  const auto r = S::sub(x, whole);
  auto y = S::splat(factor * 1.326472731e-3f);
  y = S::fma(y, r, S::splat(factor * 9.671512991e-3f));
  y = S::fma(y, r, S::splat(factor * 5.550733581e-2f));
  y = S::fma(y, r, S::splat(factor * 2.402224243e-1f));
  y = S::fma(y, r, S::splat(factor * 6.931470037e-1f));
  y = S::fma(y, r, S::splat(factor * 1.0f));
  return S::scale_by_power(y, whole);
}

template <class S>
struct Noise {
  typename S::F k, v;  // uniform in [0, 1), 24 bits
};

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

// Words 0 and 1 of the blocks with counter (layer, head, position, channel..channel+15); see philox.py.
template <class S>
Noise<S> noise(const RoundKeys& keys, int layer, int head, std::int64_t position, int channel) {
  using I = typename S::I;
  struct Words {
    I k, v;
  };
  constexpr std::uint32_t factor_a = 0xD2511F53u, factor_b = 0xCD9E8D57u;
  // All lanes share three of the counter's words, so the first round needs no vectors but for the channel.
  const std::uint64_t first_a = std::uint64_t(factor_a) * std::uint32_t(layer);
  const std::uint64_t first_b = std::uint64_t(factor_b) * std::uint32_t(position);
  const auto key = [&](std::uint32_t word) { return S::splat_int(std::int32_t(word)); };
  // Channels in the lower halves of 64 bits, which a product fills; nothing reads the upper halves of the words.
  const auto words = [&](I channels) __attribute__((always_inline)) {
    I c0 = key(std::uint32_t(first_b >> 32) ^ std::uint32_t(head) ^ keys.a[0]), c1 = key(std::uint32_t(first_b));
    I c2 = S::bit_xor(channels, key(std::uint32_t(first_a >> 32) ^ keys.b[0])), c3 = key(std::uint32_t(first_a));
    unrolled<RoundKeys::kRounds - 2>([&](auto round) __attribute__((always_inline)) {
      const I a = S::multiply_lower(c0, factor_a), b = S::multiply_lower(c2, factor_b);
      c0 = S::bit_xor(S::bit_xor(S::upper(b), c1), key(keys.a[round + 1]));
      c2 = S::bit_xor(S::bit_xor(S::upper(a), c3), key(keys.b[round + 1]));
      c1 = b;
      c3 = a;
    });
    const I last = S::multiply_lower(c2, factor_b);
    return Words{S::bit_xor(S::bit_xor(S::upper(last), c1), key(keys.a[RoundKeys::kRounds - 1])), last};
  };
  const I channels = S::add_int(S::lane_numbers(), S::splat_int(channel));
  const Words even = words(channels), odd = words(S::upper(channels));
  const auto uniform = [](I even, I odd) {
    return S::mul(S::to_float(S::template shift_right<8>(S::interleave(even, odd))), S::splat(0x1p-24f));
  };
  return {uniform(even.k, odd.k), uniform(even.v, odd.v)};
}

}  // namespace hack
