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

// Philox4x32-10 with counter (layer, head, position, channel..channel+15) and the seed as key; see philox.py.
template <class S>
Noise<S> noise(std::uint64_t seed, int layer, int head, std::int64_t position, int channel) {
  using I = typename S::I;
  constexpr std::uint32_t factor_a = 0xD2511F53u, factor_b = 0xCD9E8D57u;
  std::uint32_t k0 = std::uint32_t(seed), k1 = std::uint32_t(seed >> 32);
  // All lanes share three of the counter's words, so the first round needs no vectors but for the channel.
  const std::uint64_t first_a = std::uint64_t(factor_a) * std::uint32_t(layer);
  const std::uint64_t first_b = std::uint64_t(factor_b) * std::uint32_t(position);
  I c0 = S::splat_int(std::int32_t(std::uint32_t(first_b >> 32) ^ std::uint32_t(head) ^ k0));
  I c1 = S::splat_int(std::int32_t(first_b));
  I c2 = S::bit_xor(S::add_int(S::lane_numbers(), S::splat_int(channel)),
                    S::splat_int(std::int32_t(std::uint32_t(first_a >> 32) ^ k1)));
  I c3 = S::splat_int(std::int32_t(first_a));
  unrolled<9>([&](auto) __attribute__((always_inline)) {
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
    I high_a, low_a, high_b, low_b;
    S::multiply_wide(c0, factor_a, high_a, low_a);
    S::multiply_wide(c2, factor_b, high_b, low_b);
    c0 = S::bit_xor(S::bit_xor(high_b, c1), S::splat_int(std::int32_t(k0)));
    c2 = S::bit_xor(S::bit_xor(high_a, c3), S::splat_int(std::int32_t(k1)));
    c1 = low_b;
    c3 = low_a;
  });
  const auto step = S::splat(0x1p-24f);
  return {S::mul(S::to_float(S::template shift_right<8>(c0)), step),
          S::mul(S::to_float(S::template shift_right<8>(c1)), step)};
}

}  // namespace hack
