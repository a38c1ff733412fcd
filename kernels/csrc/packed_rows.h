// Codes that are packed along rows, for pages that are read value by value: byte (r, c) of a plane [.., D] holds rows
// f·r .. f·r + f - 1 of channel c, the first in the lowest bits. Codes of 3, 5 and 6 bits have a plane of the lower 2
// or 4 bits and a plane of the bits above, `high`.
//
// Pages rest in wire order: any 16 neighbouring bytes of a plane give one row's codes of 16 channels.
#pragma once

#include "unrolled.h"
#include "widths.h"

namespace hack {

constexpr int packed_low(int bits) {
  return bits == 5 || bits == 6 ? 4 : bits == 3 ? 2 : bits;
}

constexpr int packed_high(int bits) {
  return bits - packed_low(bits);
}

template <class S, int bits>
struct PackedRows {
  const std::uint8_t* low;
  const std::uint8_t* high;
  int d;

  // Codes of channels c .. c + 15 of row t, a byte each.
  [[gnu::always_inline]] typename S::B at(int t, int c) const {
    const auto codes = field<packed_low(bits)>(low, t, c);
    if constexpr (packed_high(bits) == 0) {
      return codes;
    } else {
      return S::template with_upper<packed_low(bits)>(codes, field<packed_high(bits)>(high, t, c));
    }
  }
  [[gnu::always_inline]] void fetch(int t, int c) const {
    if (c % 64 != 0) return;
    line<packed_low(bits)>(low, t, c);
    if constexpr (packed_high(bits) != 0) line<packed_high(bits)>(high, t, c);
  }

 private:
  template <int width>
  [[gnu::always_inline]] typename S::B field(const std::uint8_t* plane, int t, int c) const {
    constexpr int f = 8 / width;
    const auto bytes = S::load_bytes(plane + std::size_t(unsigned(t) / f) * d + c);
    if constexpr (width == 8) return bytes;
    return S::template byte_field<width>(bytes, unsigned(t) % f * width);
  }
  template <int width>
  [[gnu::always_inline]] void line(const std::uint8_t* plane, int t, int c) const {
    constexpr int f = 8 / width;
    if (unsigned(t) % f == 0) hack::fetch(plane + std::size_t(unsigned(t) / f) * d + c);
  }
};

template <class S>
float largest_magnitude(const float* x, int d) {
  auto most = S::zero();
  for (int c = 0; c < d; c += kLanes) most = S::max(S::max(S::load(x + c), S::sub(S::zero(), S::load(x + c))), most);
  return S::reduce_max(most);
}

// Codes of a row x [d] around `centre`, where no magnitude is above `reach`: to nearest, ties to even.
template <class S>
void store_around(const float* x, int d, int centre, float reach, std::uint8_t* codes) {
  for (int c = 0; c < d; c += kLanes) {
    const auto steps = S::div(S::mul(S::load(x + c), S::splat(float(centre))), S::splat(reach));
    S::store_low_bytes(codes + c, S::add_int(S::nearest(steps), S::splat_int(centre)));
  }
}

// Packs one field of codes [rows, d], a byte each: `width` bits from bit `from` on.
template <class S>
void pack_field(const std::uint8_t* codes, int rows, int d, int from, int width, std::uint8_t* packed) {
  const int f = 8 / width, mask = (1 << width) - 1;
  for (int r = 0; r < rows; r += f, codes += std::size_t(f) * d, packed += d) {
    for (int c = 0; c < d; ++c) packed[c] = std::uint8_t((codes[c] >> from) & mask);
    for (int i = 1; i < f; ++i)
      for (int c = 0; c < d; ++c) packed[c] |= std::uint8_t(((codes[i * d + c] >> from) & mask) << (i * width));
  }
}

template <class S>
void pack_rows(const std::uint8_t* codes, int rows, int d, int bits, std::uint8_t* low, std::uint8_t* high) {
  pack_field<S>(codes, rows, d, 0, packed_low(bits), low);
  if (packed_high(bits) != 0) pack_field<S>(codes, rows, d, packed_low(bits), packed_high(bits), high);
}

}  // namespace hack
