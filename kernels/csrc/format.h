// The page format in C++: sizes of every plane, and the order in which codes rest here.
//
// Native order. A vector of 64 bytes holds [16 lanes][4 elements] with 8/bits planes, plane f in bits f*bits..: one
// shift and one AND make the unsigned operand of a 4-way integer dot product, and no lane ever needs a horizontal sum.
//   K: lanes are 16 tokens, elements are channels.  k_codes [Π/16][D/chunk][16 tokens][4], channel = chunk*c + 4f + i
//   V: lanes are 16 channels, elements are tokens.  v_codes [D/16][Π/chunk][16 channels][4], token = chunk*c + 4f + i
// where chunk = 4 * planes. k_min, k_scale and k_sums rest as [G][Π]; v_min, v_scale and v_sums as [D].
#pragma once

#include <cstddef>
#include <cstdint>

namespace hack {

inline constexpr int kLanes = 16;  // lanes of a vector: FP32 values, or groups of 4 codes
inline constexpr int kQuad = 4;    // codes that one lane multiplies at once
inline constexpr int kVectorBytes = kLanes * kQuad;
inline constexpr int kMaxPageTokens = 128;
inline constexpr int kMaxHeadDim = 256;
inline constexpr float kSymmetricLevels = 127.0f;
inline constexpr float kAsymmetricLevels = 255.0f;
inline constexpr float kMaxHalf = 65504.0f;
inline constexpr float kLog2e = 1.44269504088896340736f;

static_assert(kVectorBytes == 64, "a vector of codes is one cache line");

struct Format {
  int head_dim;
  int page_tokens;
  int k_bits;
  int v_bits;
  int k_partition;
  bool stochastic;
  bool asymmetric;
  bool stored_sums;
  bool own_k_codes;  // open page: K as codes (K_CODES) instead of FP16 (EXACT)
  bool own_v_codes;  // and V too (REQUANTIZE): the open page rests among the sealed ones
  std::uint64_t seed;

  constexpr bool coded() const { return k_bits <= 4; }  // false: the "codes" are rows of 16-bit floats
  constexpr int k_groups() const { return head_dim / k_partition; }
  constexpr bool sums_at_rest() const { return asymmetric && stored_sums; }
  constexpr std::size_t elements() const { return std::size_t(page_tokens) * head_dim; }
  constexpr std::size_t k_code_bytes() const { return elements() * k_bits / 8; }
  constexpr std::size_t v_code_bytes() const { return elements() * v_bits / 8; }
  constexpr std::size_t k_meta() const { return std::size_t(page_tokens) * k_groups(); }
  constexpr std::size_t v_meta() const { return std::size_t(head_dim); }
  constexpr int k_sum_bytes() const { return sum_bytes(k_bits, k_partition); }
  constexpr int v_sum_bytes() const { return sum_bytes(v_bits, page_tokens); }

 private:
  static constexpr int sum_bytes(int bits, int partition) { return ((1 << bits) - 1) * partition <= 255 ? 1 : 2; }
};

constexpr int planes_of(int bits) {
  return 8 / bits;
}
constexpr int chunk_of(int bits) {
  return kQuad * planes_of(bits);
}

// Bytes of one page of one KV head at head_dim 128, Π 64, 2 bits: the numbers of the design.
inline constexpr Format kDesignPage{128, 64, 2, 2, 64, false, true, true, false, false, 0};
static_assert(kDesignPage.k_code_bytes() == 2048 && kDesignPage.v_code_bytes() == 2048);
static_assert(4 * kDesignPage.k_meta() == 512 && 4 * kDesignPage.v_meta() == 512);
static_assert(kDesignPage.k_meta() * kDesignPage.k_sum_bytes() == 128);
static_assert(kDesignPage.v_meta() * kDesignPage.v_sum_bytes() == 128);

// Planes of one page of one KV head; sums are null where the format keeps none.
template <class Byte, class Half>
struct BasicPage {
  Byte* k_codes;
  Half* k_min;
  Half* k_scale;
  Byte* k_sums;
  Byte* v_codes;
  Half* v_min;
  Half* v_scale;
  Byte* v_sums;
};
using Page = BasicPage<std::uint8_t, std::uint16_t>;
using ConstPage = BasicPage<const std::uint8_t, const std::uint16_t>;

}  // namespace hack
