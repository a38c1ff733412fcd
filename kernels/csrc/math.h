// Exponential and the randomness of stochastic rounding on 16 lanes.
#pragma once

#include "format.h"

namespace hack {

// 2^x for x <= 0, also -inf; relative error 2e-7. Cephes' polynomial on [-1/2, 1/2].
template <class S>
typename S::F exp2(typename S::F x) {
  x = S::max(x, S::splat(-160.0f));
  const auto whole = S::round(x);
  const auto r = S::sub(x, whole);
  auto y = S::splat(1.535336188319500e-4f);
  y = S::fma(y, r, S::splat(1.339887440266574e-3f));
  y = S::fma(y, r, S::splat(9.618437357674640e-3f));
  y = S::fma(y, r, S::splat(5.550332471162809e-2f));
  y = S::fma(y, r, S::splat(2.402264791363012e-1f));
  y = S::fma(y, r, S::splat(6.931472028550421e-1f));
  y = S::fma(y, r, S::splat(1.0f));
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
  I c0 = S::splat_int(layer), c1 = S::splat_int(head), c2 = S::splat_int(std::int32_t(std::uint32_t(position)));
  I c3 = S::add_int(S::lane_numbers(), S::splat_int(channel));
  std::uint32_t k0 = std::uint32_t(seed), k1 = std::uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    I high_a, low_a, high_b, low_b;
    S::multiply_wide(c0, 0xD2511F53u, high_a, low_a);
    S::multiply_wide(c2, 0xCD9E8D57u, high_b, low_b);
    c0 = S::bit_xor(S::bit_xor(high_b, c1), S::splat_int(std::int32_t(k0)));
    c2 = S::bit_xor(S::bit_xor(high_a, c3), S::splat_int(std::int32_t(k1)));
    c1 = low_b;
    c3 = low_a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const auto step = S::splat(0x1p-24f);
  return {S::mul(S::to_float(S::template shift_right<8>(c0)), step),
          S::mul(S::to_float(S::template shift_right<8>(c1)), step)};
}

}  // namespace hack
