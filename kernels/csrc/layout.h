// Codes between three orders: one byte per code [Π, D], native (format.h) and wire (base.py).
#pragma once

#include <cstring>

#include "format.h"

namespace hack {

// --- native order ---------------------------------------------------------------------------------------------------

template <class S, int bits>
void pack_k(const Format& fmt, const std::uint8_t* codes, std::uint8_t* out) {
  constexpr int kPlanes = planes_of(bits);
  for (int block = 0; block < fmt.page_tokens; block += kLanes) {
    for (int d = 0; d < fmt.head_dim; d += chunk_of(bits), out += kVectorBytes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        std::uint32_t quads[kPlanes], word = 0;
        std::memcpy(quads, codes + (block + lane) * fmt.head_dim + d, sizeof quads);
        for (int f = 0; f < kPlanes; ++f) word |= quads[f] << (bits * f);
        std::memcpy(out + kQuad * lane, &word, sizeof word);
      }
    }
  }
}

template <class S, int bits>
void unpack_k(const Format& fmt, const std::uint8_t* packed, std::uint8_t* codes) {
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
void pack_v(const Format& fmt, const std::uint8_t* codes, std::uint8_t* out) {
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
void unpack_v(const Format& fmt, const std::uint8_t* packed, std::uint8_t* codes) {
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

template <class S, int bits>
void k_to_wire(const Format& fmt, const std::uint8_t* codes, std::uint8_t* wire) {
  for (int t = 0; t < fmt.page_tokens; t += planes_of(bits), wire += fmt.head_dim) {
    for (int d = 0; d < fmt.head_dim; ++d) {
      unsigned byte = 0;
      for (int f = 0; f < planes_of(bits); ++f) byte |= unsigned(codes[(t + f) * fmt.head_dim + d]) << (bits * f);
      wire[d] = std::uint8_t(byte);
    }
  }
}

template <class S, int bits>
void k_from_wire(const Format& fmt, const std::uint8_t* wire, std::uint8_t* codes) {
  for (int t = 0; t < fmt.page_tokens; t += planes_of(bits), wire += fmt.head_dim)
    for (int f = 0; f < planes_of(bits); ++f)
      for (int d = 0; d < fmt.head_dim; ++d)
        codes[(t + f) * fmt.head_dim + d] = (wire[d] >> (bits * f)) & ((1 << bits) - 1);
}

template <class S, int bits>
void v_to_wire(const Format& fmt, const std::uint8_t* codes, std::uint8_t* wire) {
  const int row_bytes = fmt.page_tokens * bits / 8;
  for (int r = 0; r < row_bytes; ++r) {
    const std::uint8_t* rows = codes + r * planes_of(bits) * fmt.head_dim;
    for (int d = 0; d < fmt.head_dim; ++d) {
      unsigned byte = 0;
      for (int f = 0; f < planes_of(bits); ++f) byte |= unsigned(rows[f * fmt.head_dim + d]) << (bits * f);
      wire[d * row_bytes + r] = std::uint8_t(byte);
    }
  }
}

template <class S, int bits>
void v_from_wire(const Format& fmt, const std::uint8_t* wire, std::uint8_t* codes) {
  const int row_bytes = fmt.page_tokens * bits / 8;
  for (int r = 0; r < row_bytes; ++r) {
    std::uint8_t* rows = codes + r * planes_of(bits) * fmt.head_dim;
    for (int f = 0; f < planes_of(bits); ++f)
      for (int d = 0; d < fmt.head_dim; ++d)
        rows[f * fmt.head_dim + d] = (wire[d * row_bytes + r] >> (bits * f)) & ((1 << bits) - 1);
  }
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

// Σ codes per partition, in native order: K [G, Π], V [D].
template <class S>
void count_sums(const Format& fmt, const std::uint8_t* k_codes, const std::uint8_t* v_codes, const Page& page) {
  for (int t = 0; t < fmt.page_tokens; ++t) {
    for (int g = 0; g < fmt.k_groups(); ++g) {
      int sum = 0;
      for (int z = 0; z < fmt.k_partition; ++z) sum += k_codes[t * fmt.head_dim + g * fmt.k_partition + z];
      store_sum<S>(page.k_sums, fmt.k_sum_bytes(), g * fmt.page_tokens + t, sum);
    }
  }
  for (int d = 0; d < fmt.head_dim; ++d) {
    int sum = 0;
    for (int t = 0; t < fmt.page_tokens; ++t) sum += v_codes[t * fmt.head_dim + d];
    store_sum<S>(page.v_sums, fmt.v_sum_bytes(), d, sum);
  }
}

}  // namespace hack
