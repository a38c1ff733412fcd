// 16 lanes as plain arrays: any C++20 compiler, any processor; loops are left to the compiler's vectorizer.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../half.h"
#include "../widths.h"

namespace hack {

struct Portable {
  static constexpr const char* name = "portable";
  static constexpr int kTileRows = 4;    // accumulators of an integer product: rows of Q or P
  static constexpr int kTileBlocks = 2;  // times vectors of codes
  static constexpr int kProductRows = 1;     // accumulators of a product in FP32: rows of x
  static constexpr int kProductOutputs = 2;  // times rows of a weight
  static constexpr int kProductCache = 1 << 14;
  static constexpr int kBlockRows = 1;   // accumulators of a product with codes of a weight: rows of x
  static constexpr int kBlockTiles = 1;  // times tiles of 16 rows of a weight
  static constexpr int kBlockTilesOfOneRow = 1;
  struct F {
    float v[16];
  };
  struct I {
    std::uint32_t v[16];
  };
  struct W {
    std::uint64_t v[8];
  };
  struct B {
    std::uint8_t v[16];
  };
  static constexpr bool kDotTakesBytes = true;  // one `dot` serves codes of every width

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
  static F load_bfloat(const std::uint16_t* p) {
    return lanes<F>([=](int i) { return bfloat_to_float(p[i]); });
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
  static F above_floor(F x) {
    return lanes<F>([&](int i) { return x.v[i] - whole_below(x.v[i]); });
  }
  static F scale_by_floor(F x, F n) {  // 0 below the normal range
    return lanes<F>([&](int i) {
      const float whole = whole_below(n.v[i]);
      const std::uint32_t exponent = whole > -127.0f ? std::uint32_t(int(whole) + 127) : 0;
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
  // 16 vectors of 16 lanes: lane i of vector j goes to lane j of vector i.
  static void transpose(F (&x)[16]) {
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < i; ++j) std::swap(x[i].v[j], x[j].v[i]);
  }

  static I zero_int() { return splat_int(0); }
  static I splat_int(std::int32_t x) {
    return lanes<I>([=](int) { return std::uint32_t(x); });
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
  static F to_float(I x) {
    return lanes<F>([&](int i) { return float(std::int32_t(x.v[i])); });
  }
  static I shift_left(I x, int n) {
    return lanes<I>([&](int i) { return x.v[i] << n; });
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
  // B is 16 bytes, a code of up to 8 bits in each.
  static B load_bytes(const std::uint8_t* p) {
    B x;
    std::memcpy(x.v, p, sizeof x.v);
    return x;
  }
  // The field of `width` bits that begins `shift` bits up in every byte.
  template <int width>
  static B byte_field(B x, int shift) {
    return lanes<B>([&](int i) { return std::uint8_t((x.v[i] >> shift) & ((1 << width) - 1)); });
  }
  static B with_upper_nibble(B low, B high) {
    return lanes<B>([&](int i) { return std::uint8_t(low.v[i] | (high.v[i] << 4)); });
  }
  static F bytes_to_float(B x) {
    return lanes<F>([&](int i) { return float(x.v[i]); });
  }
  // Codes of a sign, an exponent and a mantissa, read as FP16 whose exponent has the same lowest bit.
  template <int exponent, int mantissa>
  static F small_floats(B x) {
    constexpr int top = exponent + mantissa;
    return lanes<F>([&](int i) {
      const std::uint32_t sign = (x.v[i] >> top) & 1u, size = x.v[i] & ((1u << top) - 1);
      return half_to_float(std::uint16_t((sign << 15) | (size << (10 - mantissa))));
    });
  }
  template <int bits, int f>
  static I plane(I x) {
    constexpr std::uint32_t mask = 0x01010101u * ((1u << bits) - 1);
    return lanes<I>([&](int i) { return (x.v[i] >> (bits * f)) & mask; });
  }
  // `low` plus 4 times bit f of every byte of x: a code's lower two bits and its highest.
  template <int f>
  static I with_high(I low, I x) {
    return lanes<I>([&](int i) { return low.v[i] | (((x.v[i] >> f) & 0x01010101u) << 2); });
  }
  // acc + Σ of 4 products per lane, unsigned codes times signed bytes, or unsigned ones.
  template <int bits = kNarrow>
  static I dot(I acc, I codes, I signed_bytes) {
    return sum_products<std::int8_t>(acc, codes, signed_bytes);
  }
  template <int bits = kNarrow>
  static I dot_unsigned(I acc, I codes, I bytes) {
    return sum_products<std::uint8_t>(acc, codes, bytes);
  }
  // W is 8 words of 32 bits, each in the lower half of 64, which a product fills.
  static W splat_word(std::uint32_t x) {
    return words([=](int) { return x; });
  }
  static W multiply(W x, std::uint32_t y) {
    return words([&](int i) { return (x.v[i] & 0xFFFFFFFFu) * y; });
  }
  static W upper(W x) {
    return words([&](int i) { return x.v[i] >> 32; });
  }
  static W bit_xor(W x, W y) {
    return words([&](int i) { return x.v[i] ^ y.v[i]; });
  }
  // The numbers 0..7 in the order that `shorts` wants.
  static W block_numbers() {
    return words([](int i) { return 2 * (i % 4) + i / 4; });
  }
  // Four words of each of 8 blocks -> 16-bit halves in order, those of blocks 0 and 2, 4 and 6, 1 and 3, 5 and 7.
  static void shorts(const W (&words)[4], I (&out)[4]) {
    for (int i = 0; i < 4; ++i)
      out[i] =
          lanes<I>([&](int j) { return std::uint32_t(words[j % 8 / 2].v[2 * i + j / 8]) >> (16 * (j % 2)) & 0xFFFFu; });
  }

 private:
  // floor(x) for |x| < 2^22 or whole x; std::floor is a library call on old processors.
  static float whole_below(float x) {
    const float nearest = (x + 0x1.8p23f) - 0x1.8p23f;
    return nearest > x ? nearest - 1.0f : nearest;
  }
  template <class Byte>
  static I sum_products(I acc, I codes, I bytes) {
    std::uint8_t u[64];
    Byte s[64];
    std::memcpy(u, codes.v, sizeof u);
    std::memcpy(s, bytes.v, sizeof s);
    for (int i = 0; i < 16; ++i) {
      std::int32_t sum = 0;
      for (int j = 4 * i; j < 4 * i + 4; ++j) sum += std::int32_t(u[j]) * s[j];
      acc.v[i] += std::uint32_t(sum);
    }
    return acc;
  }
  template <class V, class Make>
  static V lanes(Make make) {
    V x;
    for (int i = 0; i < 16; ++i) x.v[i] = make(i);
    return x;
  }
  template <class Make>
  static W words(Make make) {
    W x;
    for (int i = 0; i < 8; ++i) x.v[i] = make(i);
    return x;
  }
};

}  // namespace hack
