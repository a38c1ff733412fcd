// 16 lanes as vectors of GCC and Clang, for every processor: the compiler cuts them into the processor's own vectors.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../half.h"
#include "../widths.h"

namespace hack {

struct Portable {
  static constexpr const char* name = "portable";
  static constexpr int kTileRows = 4;    // accumulators of an integer product: rows of Q or P
  static constexpr int kTileBlocks = 2;  // times vectors of codes
  using Products = Portable;
  static constexpr int kProductLanes = kLanes;
  static constexpr int kProductRows = 1;     // accumulators of a product in FP32: rows of x
  static constexpr int kProductOutputs = 2;  // times rows of a weight
  static constexpr int kProductOutputsOfOneRow = 2;
  static constexpr int kTurnRows = 2;     // accumulators of a rotation of heads: rows of x
  static constexpr int kTurnVectors = 1;  // times vectors of outputs
  static constexpr int kTurnVectorsOfOneRow = 2;
  static constexpr int kProductCache = 1 << 14;
  static constexpr bool kMultipliesWords = false;
  static constexpr int kBlockRows = 1;  // accumulators of a product with codes of a weight: rows of x
  template <int rows>
  static constexpr int kBlockTiles = 1;  // times tiles of 16 rows of a weight
  using F = float __attribute__((vector_size(64)));
  using I = std::uint32_t __attribute__((vector_size(64)));
  using W = std::uint64_t __attribute__((vector_size(64)));
  using B = std::uint8_t __attribute__((vector_size(16)));
  static constexpr bool kDotTakesBytes = true;  // one `dot` serves codes of every width

  static F zero() { return splat(0.0f); }
  static F splat(float x) { return x - F{}; }  // -0 stays -0
  static F load(const float* p) { return read<F>(p); }
  static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
  static F load_half(const std::uint16_t* p) {
    return lanes<F>([=](int i) { return half_to_float(p[i]); });
  }
  static F load_bfloat(const std::uint16_t* p) {
    return lanes<F>([=](int i) { return bfloat_to_float(p[i]); });
  }
  static void store_half(std::uint16_t* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_half(x[i]);
  }
  static void store_half_up(std::uint16_t* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_half_up(x[i]);
  }
  static void store_bfloat(std::uint16_t* p, F x) {
    for (int i = 0; i < 16; ++i) p[i] = float_to_bfloat(x[i]);
  }
  static F add(F x, F y) { return x + y; }
  static F sub(F x, F y) { return x - y; }
  static F mul(F x, F y) { return x * y; }
  static F div(F x, F y) { return x / y; }
  static F fma(F x, F y, F z) { return x * y + z; }  // two roundings: a true fma is a library call on old processors
  // One rounding. The product is exact in FP64. The sum is rounded to odd in FP64; rounding that to FP32 gives the same
  // as rounding the exact sum (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
  static F fused(F x, F y, F z) {
    const D product = __builtin_convertvector(x, D) * __builtin_convertvector(y, D), term = __builtin_convertvector(z, D);
    const D sum = product + term, back = sum - product;
    const D error = (product - (sum - back)) + (term - back);
    const Long bits = std::bit_cast<Long>(sum);
    const Long away = (error > 0.0) == (sum > 0.0) ? Long{} + 1 : Long{} - 1;  // from 0, or towards it
    const Long odd = (error != 0.0) & (error == error) & ((bits & 1) == 0) ? bits + away : bits;
    return __builtin_convertvector(std::bit_cast<D>(odd), F);
  }
  static F min(F x, F y) { return x < y ? x : y; }
  static F max(F x, F y) { return x > y ? x : y; }
  static F round(F x) { return (x + 0x1.8p23f) - 0x1.8p23f; }  // |x| < 2^22
  static F floor(F x) {
    return lanes<F>([&](int i) { return std::floor(x[i]); });
  }
  static F above_floor(F x) { return x - whole_below(x); }
  static F scale_by_floor(F x, F n) {  // 0 below the normal range
    const F whole = whole_below(n);
    const I exponent = __builtin_convertvector(__builtin_convertvector(max(whole, splat(-127.0f)), Signed) + 127, I);
    return x * std::bit_cast<F>(exponent << 23);
  }
  static float reduce_max(F x) {
    return folded<float>(x, [](float a, float b) { return a > b ? a : b; });
  }
  static float reduce_min(F x) {
    return folded<float>(x, [](float a, float b) { return a < b ? a : b; });
  }
  static float reduce_add(F x) {
    return folded<float>(x, [](float a, float b) { return a + b; });
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
      for (int j = 0; j < i; ++j) {
        const float kept = x[i][j];
        x[i][j] = x[j][i];
        x[j][i] = kept;
      }
  }

  static I zero_int() { return splat_int(0); }
  static I splat_int(std::int32_t x) { return std::uint32_t(x) + I{}; }
  static I load_int(const void* p) { return read<I>(p); }
  static void store_int(void* p, I x) { std::memcpy(p, &x, sizeof x); }
  static I broadcast_quad(const void* p) {
    std::int32_t x;
    std::memcpy(&x, p, sizeof x);
    return splat_int(x);
  }
  static I add_int(I x, I y) { return x + y; }
  static F to_float(I x) { return __builtin_convertvector(std::bit_cast<Signed>(x), F); }
  static I shift_left(I x, int n) { return x << n; }
  static I truncate(F x) { return std::bit_cast<I>(__builtin_convertvector(x, Signed)); }
  // The largest whole number that is not above x, for |x| < 2^22.
  static I floor_int(F x) { return truncate(whole_below(x)); }
  static I nearest(F x) { return truncate(round(x)); }
  static int reduce_add_int(I x) {
    return int(folded<std::uint32_t>(x, [](std::uint32_t a, std::uint32_t b) { return a + b; }));
  }
  static void store_low_bytes(std::uint8_t* p, I x) {
    const B bytes = __builtin_convertvector(x, B);
    std::memcpy(p, &bytes, sizeof bytes);
  }
  // B is 16 bytes, a code of up to 8 bits in each.
  static B load_bytes(const std::uint8_t* p) { return read<B>(p); }
  // The field of `width` bits that begins `shift` bits up in every byte.
  template <int width>
  static B byte_field(B x, int shift) {
    return (x >> shift) & std::uint8_t((1 << width) - 1);
  }
  // `high` above the lower n bits; together they fit into a byte.
  template <int n>
  static B with_upper(B low, B high) {
    return low | (high << n);
  }
  static F bytes_to_float(B x) { return __builtin_convertvector(x, F); }
  // Lane x[i] of the table, for codes below 16.
  static F look_up(F table, B x) {
    return lanes<F>([&](int i) { return table[x[i]]; });
  }
  // Codes of a sign, an exponent and a mantissa, read as FP16 whose exponent has the same lowest bit.
  template <int exponent, int mantissa>
  static F small_floats(B x) {
    constexpr int top = exponent + mantissa;
    return lanes<F>([&](int i) {
      const std::uint32_t sign = (x[i] >> top) & 1u, size = x[i] & ((1u << top) - 1);
      return half_to_float(std::uint16_t((sign << 15) | (size << (10 - mantissa))));
    });
  }
  template <int bits, int f>
  static I plane(I x) {
    constexpr std::uint32_t mask = 0x01010101u * ((1u << bits) - 1);
    return (x >> (bits * f)) & mask;
  }
  // `low` plus 4 times bit f of every byte of x: a code's lower two bits and its highest.
  template <int f>
  static I with_high(I low, I x) {
    return low | (((x >> f) & 0x01010101u) << 2);
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
  // acc + the products of two words of 16 bits per lane.
  static I word_dot(I acc, I x, I y) {
    const Signed a = std::bit_cast<Signed>(x), b = std::bit_cast<Signed>(y);
    const Signed low = ((a << 16) >> 16) * ((b << 16) >> 16), high = (a >> 16) * (b >> 16);
    return acc + std::bit_cast<I>(low) + std::bit_cast<I>(high);
  }
  // Pairs of words of 16 bits: the lower word of `low`, and above it the lower word of `high`.
  static I word_pairs(I low, I high) { return (low & 0xFFFFu) | (high << 16); }
  // Accumulators of a product with rows in lanes: vectors of rows, times words of a page.
  static constexpr int kLaneVectors = 1;
  static constexpr int kLaneRows = 4;
  template <int bits>
  static constexpr int kRunOfDots = 0;  // sums of 32 bits hold any number of products
  template <int bits>
  static I run_dot(I sum, I codes, I signed_bytes) {
    return dot(sum, codes, signed_bytes);
  }
  static I run_total(I run) { return run; }
  // A sum that began at kSumStart becomes a float, and a float times `factor`.
  static constexpr std::int32_t kSumStart = 0;
  static F whole_sum(I sum) { return to_float(sum); }
  static F scaled_sum(I sum, float factor) { return to_float(sum) * factor; }
  // Lanes of numbers in 0..127 to lanes of four bytes.
  static I quads_of(I a, I b, I c, I d) { return a | b << 8 | c << 16 | d << 24; }
  // W is 8 words of 32 bits, each in the lower half of 64 bits. A product fills all 64.
  static W splat_word(std::uint32_t x) { return std::uint64_t(x) + W{}; }
  static W multiply(W x, std::uint32_t y) { return (x & 0xFFFFFFFFu) * std::uint64_t(y); }
  static W upper(W x) { return x >> 32; }
  static W bit_xor(W x, W y) { return x ^ y; }
  // The numbers 0..7 in the order for `shorts`.
  static W block_numbers() { return W{0, 2, 4, 6, 1, 3, 5, 7}; }
  // Four words of each of 8 blocks -> their 16-bit halves in order, of blocks 0 and 2, 4 and 6, 1 and 3, 5 and 7.
  static void shorts(const W (&words)[4], I (&out)[4]) {
    for (int i = 0; i < 4; ++i)
      out[i] =
          lanes<I>([&](int j) { return std::uint32_t(words[j % 8 / 2][2 * i + j / 8]) >> (16 * (j % 2)) & 0xFFFFu; });
  }

 private:
  using Signed = std::int32_t __attribute__((vector_size(64)));
  using D = double __attribute__((vector_size(128)));
  using Long = std::int64_t __attribute__((vector_size(128)));

  template <class V>
  static V read(const void* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  // floor(x) for |x| < 2^22 or whole x; std::floor is a library call on old processors.
  static F whole_below(F x) {
    const F nearest = round(x);
    return nearest > x ? nearest - 1.0f : nearest;
  }
  // Step j of 4 multiplies byte j of every lane.
  template <class Byte>
  static I sum_products(I acc, I codes, I bytes) {
    constexpr bool is_signed = std::is_signed_v<Byte>;
    for (int j = 0; j < 4; ++j) {
      const I code = (codes >> (8 * j)) & 0xFFu;
      const Signed moved = std::bit_cast<Signed>(bytes << (24 - 8 * j));
      const I byte = is_signed ? std::bit_cast<I>(moved >> 24) : std::bit_cast<I>(moved) >> 24;
      acc += code * byte;
    }
    return acc;
  }
  template <class Lane, class V, class With>
  static Lane folded(V x, With with) {
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) x[i] = with(x[i], x[i + width]);
    return x[0];
  }
  template <class V, class Make>
  static V lanes(Make make) {
    V x;
    for (int i = 0; i < 16; ++i) x[i] = make(i);
    return x;
  }
};

}  // namespace hack
