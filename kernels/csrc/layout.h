// Codes between three orders: one byte per code [Π, D], native (hack_format.h) and wire (hack_format.py).
#pragma once

#include <cstring>

#include "hack_format.h"

namespace hack {

// --- native order ---------------------------------------------------------------------------------------------------

// The codes of one token's chunk of channels, as its lane holds them.
template <class S, int bits>
[[gnu::always_inline]] inline std::uint32_t pack_k_lane(const std::uint8_t* codes) {
  constexpr int kPlanes = planes_of(bits);
  std::uint32_t quads[kPlanes], word = 0;
  std::memcpy(quads, codes, sizeof quads);
  for (int f = 0; f < kPlanes; ++f) word |= quads[f] << (bits * f);
  return word;
}

template <class S, int bits>
void pack_k(const PageFormat& fmt, const std::uint8_t* codes, std::uint8_t* out) {
  for (int block = 0; block < fmt.page_tokens; block += kLanes) {
    for (int d = 0; d < fmt.head_dim; d += chunk_of(bits), out += kVectorBytes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const std::uint32_t word = pack_k_lane<S, bits>(codes + (block + lane) * fmt.head_dim + d);
        std::memcpy(out + kQuad * lane, &word, sizeof word);
      }
    }
  }
}

// Packs tokens from `first` to the end of a page: codes [Π - first, D]. The tokens before stay as they are.
template <class S, int bits>
void pack_k_from(const PageFormat& fmt, int first, const std::uint8_t* codes, std::uint8_t* out) {
  const int block_bytes = fmt.head_dim / chunk_of(bits) * kVectorBytes;
  for (int t = first; t < fmt.page_tokens; ++t) {
    std::uint8_t* to = out + t / kLanes * block_bytes + t % kLanes * kQuad;
    for (int d = 0; d < fmt.head_dim; d += chunk_of(bits), codes += chunk_of(bits), to += kVectorBytes) {
      const std::uint32_t word = pack_k_lane<S, bits>(codes);
      std::memcpy(to, &word, sizeof word);
    }
  }
}

template <class S, int bits>
void unpack_k(const PageFormat& fmt, const std::uint8_t* packed, std::uint8_t* codes) {
  constexpr int kPlanes = planes_of(bits);
  constexpr std::uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  for (int block = 0; block < fmt.page_tokens; block += kLanes) {
    for (int d = 0; d < fmt.head_dim; d += chunk_of(bits), packed += kVectorBytes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        std::uint32_t quads[kPlanes], word;
        std::memcpy(&word, packed + kQuad * lane, sizeof word);
        for (int f = 0; f < kPlanes; ++f) quads[f] = (word >> (bits * f)) & mask;
        std::memcpy(codes + (block + lane) * fmt.head_dim + d, quads, sizeof quads);
      }
    }
  }
}

template <class S, int bits>
void pack_v(const PageFormat& fmt, const std::uint8_t* codes, std::uint8_t* out) {
  constexpr int kChunk = chunk_of(bits);
  for (int d = 0; d < fmt.head_dim; d += kLanes) {
    for (int block = 0; block < fmt.page_tokens; block += kChunk, out += kVectorBytes) {
      std::uint32_t words[kLanes] = {};
      for (int t = 0; t < kChunk; ++t) {
        const std::uint8_t* row = codes + (block + t) * fmt.head_dim + d;
        const int shift = bits * (t / kQuad) + 8 * (t % kQuad);
        for (int lane = 0; lane < kLanes; ++lane) words[lane] |= std::uint32_t(row[lane]) << shift;
      }
      std::memcpy(out, words, sizeof words);
    }
  }
}

template <class S, int bits>
void unpack_v(const PageFormat& fmt, const std::uint8_t* packed, std::uint8_t* codes) {
  constexpr int kChunk = chunk_of(bits);
  for (int d = 0; d < fmt.head_dim; d += kLanes) {
    for (int block = 0; block < fmt.page_tokens; block += kChunk, packed += kVectorBytes) {
      std::uint32_t words[kLanes];
      std::memcpy(words, packed, sizeof words);
      for (int t = 0; t < kChunk; ++t) {
        std::uint8_t* row = codes + (block + t) * fmt.head_dim + d;
        const int shift = bits * (t / kQuad) + 8 * (t % kQuad);
        for (int lane = 0; lane < kLanes; ++lane) row[lane] = (words[lane] >> shift) & ((1u << bits) - 1);
      }
    }
  }
}

// --- wire order -----------------------------------------------------------------------------------------------------
//
// A word of 32 bits holds the same codes in both orders (V), or `planes` words do (K), so codes move within registers.

using Word [[gnu::may_alias, gnu::aligned(1)]] = std::uint32_t;

[[gnu::always_inline]] inline const Word* words_of(const std::uint8_t* bytes) {
  return reinterpret_cast<const Word*>(bytes);
}
[[gnu::always_inline]] inline Word* words_of(std::uint8_t* bytes) {
  return reinterpret_cast<Word*>(bytes);
}

// K: `planes` words on the wire hold 4·planes channels of `planes` tokens. With their fields transposed they are the
// words of those tokens' lanes.
template <class S, int bits>
void turn_k(const Word* in, Word* out) {
  constexpr int kPlanes = planes_of(bits);
  constexpr std::uint32_t mask = 0x01010101u * ((1u << bits) - 1);
  std::uint32_t words[kPlanes];
  for (int f = 0; f < kPlanes; ++f) words[f] = in[f];
  for (int t = 0; t < kPlanes; ++t) {
    std::uint32_t word = 0;
    for (int f = 0; f < kPlanes; ++f) word |= ((words[f] >> (bits * t)) & mask) << (bits * f);
    out[t] = word;
  }
}

template <class S, int bits>
void k_from_wire(const PageFormat& fmt, const std::uint8_t* wire, std::uint8_t* packed) {
  const auto* in = words_of(wire);
  auto* out = words_of(packed);
  const int chunks = fmt.head_dim / chunk_of(bits);
  for (int t = 0; t < fmt.page_tokens; t += planes_of(bits))
    for (int c = 0; c < chunks; ++c, in += planes_of(bits))
      turn_k<S, bits>(in, out + (t / kLanes * chunks + c) * kLanes + t % kLanes);
}

template <class S, int bits>
void k_to_wire(const PageFormat& fmt, const std::uint8_t* packed, std::uint8_t* wire) {
  const auto* in = words_of(packed);
  auto* out = words_of(wire);
  const int chunks = fmt.head_dim / chunk_of(bits);
  for (int t = 0; t < fmt.page_tokens; t += planes_of(bits))
    for (int c = 0; c < chunks; ++c, out += planes_of(bits))
      turn_k<S, bits>(in + (t / kLanes * chunks + c) * kLanes + t % kLanes, out);
}

// V: code t of a channel's word lies in field t on the wire, and in byte t % 4, plane t / 4 here.
template <class S, int bits, bool to_wire>
std::uint32_t turn_v(std::uint32_t word) {
  std::uint32_t turned = 0;
  for (int t = 0; t < chunk_of(bits); ++t) {
    const int wire = bits * t, native = 8 * (t % kQuad) + bits * (t / kQuad);
    const std::uint32_t code = (word >> (to_wire ? native : wire)) & ((1u << bits) - 1);
    turned |= code << (to_wire ? wire : native);
  }
  return turned;
}

template <class S, int bits>
void v_from_wire(const PageFormat& fmt, const std::uint8_t* wire, std::uint8_t* packed) {
  const auto* in = words_of(wire);
  auto* out = words_of(packed);
  const int chunks = fmt.page_tokens / chunk_of(bits);
  for (int d = 0; d < fmt.head_dim; d += kLanes)
    for (int c = 0; c < chunks; ++c, out += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) out[lane] = turn_v<S, bits, false>(in[(d + lane) * chunks + c]);
}

template <class S, int bits>
void v_to_wire(const PageFormat& fmt, const std::uint8_t* packed, std::uint8_t* wire) {
  const auto* in = words_of(packed);
  auto* out = words_of(wire);
  const int chunks = fmt.page_tokens / chunk_of(bits);
  for (int d = 0; d < fmt.head_dim; d += kLanes)
    for (int c = 0; c < chunks; ++c, in += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) out[(d + lane) * chunks + c] = turn_v<S, bits, true>(in[lane]);
}

// --- metadata and sums ----------------------------------------------------------------------------------------------

// [rows, columns] -> [columns, rows].
template <class S, class T>
void transpose(const T* in, T* out, int rows, int columns) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) out[c * rows + r] = in[r * columns + c];
}

template <class S>
void store_sum(std::uint8_t* plane, int bytes, int index, int sum) {
  const std::uint16_t wide = std::uint16_t(sum);
  if (bytes == 1) {
    plane[index] = std::uint8_t(sum);
  } else {
    std::memcpy(plane + 2 * index, &wide, sizeof wide);
  }
}

template <class S>
int load_sum(const std::uint8_t* plane, int bytes, int index) {
  if (bytes == 1) return plane[index];
  std::uint16_t wide;
  std::memcpy(&wide, plane + 2 * index, sizeof wide);
  return wide;
}

// Σ codes of every partition of K from token `first` on: codes [Π - first, D] to native order, [G, Π].
template <class S>
void count_k_sums(const HackFormat& fmt, int first, const std::uint8_t* codes, const HackPage& page) {
  for (int t = first; t < fmt.page_tokens; ++t) {
    for (int g = 0; g < fmt.k_groups(); ++g) {
      int sum = 0;
      for (int z = 0; z < fmt.k_partition; ++z, ++codes) sum += *codes;
      store_sum<S>(page.k_sums, fmt.k_sum_bytes(), g * fmt.page_tokens + t, sum);
    }
  }
}

// Σ codes of every channel of V: codes [Π, D] to [D].
template <class S>
void count_v_sums(const HackFormat& fmt, const std::uint8_t* codes, const HackPage& page) {
  std::uint16_t sums[kMaxHeadDim] = {};
  for (int t = 0; t < fmt.page_tokens; ++t)
    for (int d = 0; d < fmt.head_dim; ++d) sums[d] += codes[t * fmt.head_dim + d];
  for (int d = 0; d < fmt.head_dim; ++d) store_sum<S>(page.v_sums, fmt.v_sum_bytes(), d, sums[d]);
}

}  // namespace hack
