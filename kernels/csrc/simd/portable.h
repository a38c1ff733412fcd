// 16 lanes as plain arrays: any C++20 compiler, any processor; loops are left to the compiler's vectorizer.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../half.h"

namespace hack {

struct Portable {
  static constexpr const char* name = "portable";
  static constexpr int kTileRows = 4;    // accumulators of an integer product: rows of Q or P
  static constexpr int kTileBlocks = 2;  // times vectors of codes
  struct F {
    float v[16];
  };
  struct I {
    std::uint32_t v[16];
  };

  static F zero() { return splat(0.0f); }
  static F splat(float x) {
    return lanes<F>([=](int) { return x; });
  }
  static F load(const float* p) {
    return lanes<F>([=](int i) { return p[i]; });
  }
  static void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
  static F load_half(const std::uint16_t* p) {
    return lanes<F>([=](int i) { return half_to_float(p[i]); });
  }
  static void store_half(std::uint16_t* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_half(x.v[i]);
  }
  static void store_half_up(std::uint16_t* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_half_up(x.v[i]);
  }
  static F add(F x, F y) {
    return lanes<F>([&](int i) { return x.v[i] + y.v[i]; });
  }
  static F sub(F x, F y) {
    return lanes<F>([&](int i) { return x.v[i] - y.v[i]; });
  }
  static F mul(F x, F y) {
    return lanes<F>([&](int i) { return x.v[i] * y.v[i]; });
  }
  static F div(F x, F y) {
    return lanes<F>([&](int i) { return x.v[i] / y.v[i]; });
  }
  static F fma(F x, F y, F z) {  // two roundings: a true fma is a library call where the processor has none
    return lanes<F>([&](int i) { return x.v[i] * y.v[i] + z.v[i]; });
  }
  static F min(F x, F y) {
    return lanes<F>([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; });
  }
  static F max(F x, F y) {
    return lanes<F>([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; });
  }
  static F round(F x) {  // |x| < 2^22
    return lanes<F>([&](int i) { return (x.v[i] + 0x1.8p23f) - 0x1.8p23f; });
  }
  static F floor(F x) {
    return lanes<F>([&](int i) { return std::floor(x.v[i]); });
  }
  static F scale_by_power(F x, F n) {  // 0 below the normal range
    return lanes<F>([&](int i) {
      const std::uint32_t exponent = n.v[i] > -127.0f ? std::uint32_t(int(n.v[i]) + 127) : 0;
      return x.v[i] * std::bit_cast<float>(exponent << 23);
    });
  }
  static float reduce_max(F x) {
    float best = x.v[0];
    for (int i = 1; i < 16; ++i) best = x.v[i] > best ? x.v[i] : best;
    return best;
  }
  static float reduce_min(F x) {
    float best = x.v[0];
    for (int i = 1; i < 16; ++i) best = x.v[i] < best ? x.v[i] : best;
    return best;
  }
  static float reduce_add(F x) {
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
    return x.v[0];
  }
  // out[i] = maximum or sum of the lanes of rows[i].
  static void fold_max(const F (&rows)[4], float* out) {
    for (int i = 0; i < 4; ++i) out[i] = reduce_max(rows[i]);
  }
  static void fold_add(const F (&rows)[4], float* out) {
    for (int i = 0; i < 4; ++i) out[i] = reduce_add(rows[i]);
  }

  static I zero_int() { return splat_int(0); }
  static I splat_int(std::int32_t x) {
    return lanes<I>([=](int) { return std::uint32_t(x); });
  }
  static I lane_numbers() {
    return lanes<I>([](int i) { return std::uint32_t(i); });
  }
  static I load_int(const void* p) {
    I x;
    std::memcpy(x.v, p, sizeof x.v);
    return x;
  }
  static void store_int(void* p, I x) { std::memcpy(p, x.v, sizeof x.v); }
  static I broadcast_quad(const void* p) {
    std::int32_t x;
    std::memcpy(&x, p, sizeof x);
    return splat_int(x);
  }
  static I add_int(I x, I y) {
    return lanes<I>([&](int i) { return x.v[i] + y.v[i]; });
  }
  static I bit_xor(I x, I y) {
    return lanes<I>([&](int i) { return x.v[i] ^ y.v[i]; });
  }
  static F to_float(I x) {
    return lanes<F>([&](int i) { return float(std::int32_t(x.v[i])); });
  }
  static I truncate(F x) {
    return lanes<I>([&](int i) { return std::uint32_t(std::int32_t(x.v[i])); });
  }
  static I nearest(F x) { return truncate(round(x)); }
  static int reduce_add_int(I x) {
    std::uint32_t sum = 0;
    for (std::uint32_t lane : x.v) sum += lane;
    return int(sum);
  }
  static void store_low_bytes(std::uint8_t* p, I x) {
    for (int i = 0; i < 16; ++i) p[i] = std::uint8_t(x.v[i]);
  }
  template <int bits>
  static I shift_right(I x) {
    return lanes<I>([&](int i) { return x.v[i] >> bits; });
  }
  template <int bits, int f>
  static I plane(I x) {
    constexpr std::uint32_t mask = 0x01010101u * ((1u << bits) - 1);
    return lanes<I>([&](int i) { return (x.v[i] >> (bits * f)) & mask; });
  }
  static I dot(I acc, I unsigned_bytes, I signed_bytes) {
    std::uint8_t u[64];
    std::int8_t s[64];
    std::memcpy(u, unsigned_bytes.v, sizeof u);
    std::memcpy(s, signed_bytes.v, sizeof s);
    for (int i = 0; i < 16; ++i) {
      std::int32_t sum = 0;
      for (int j = 4 * i; j < 4 * i + 4; ++j) sum += std::int32_t(u[j]) * s[j];
      acc.v[i] += std::uint32_t(sum);
    }
    return acc;
  }
  // Lanes in pairs of 64 bits: the product of the lower ones, the upper one, and pairs from two lower ones.
  static I multiply_lower(I x, std::uint32_t y) {
    return pairs([&](int i) { return (pair(x, i) & 0xFFFFFFFFu) * y; });
  }
  static I upper(I x) {
    return pairs([&](int i) { return pair(x, i) >> 32; });
  }
  static I interleave(I even, I odd) {
    return pairs([&](int i) { return (pair(even, i) & 0xFFFFFFFFu) | pair(odd, i) << 32; });
  }

 private:
  template <class V, class Make>
  static V lanes(Make make) {
    V x;
    for (int i = 0; i < 16; ++i) x.v[i] = make(i);
    return x;
  }
  static std::uint64_t pair(const I& x, int i) {
    std::uint64_t bits;
    std::memcpy(&bits, x.v + 2 * i, sizeof bits);
    return bits;
  }
  template <class Make>
  static I pairs(Make make) {
    I x;
    for (int i = 0; i < 8; ++i) {
      const std::uint64_t bits = make(i);
      std::memcpy(x.v + 2 * i, &bits, sizeof bits);
    }
    return x;
  }
};

}  // namespace hack
