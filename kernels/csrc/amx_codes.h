// Products of codes with rows in lanes on a matrix unit (AMX-INT8).
#pragma once

#include "code_lanes.h"
#include "simd/amx.h"

namespace hack {

// Implements what `CodeLanes` does. With `levels`, a code becomes a signed byte. A code of up to 4 bits becomes twice
// its level, so that the product needs no correction. A code of 8 bits becomes its difference to 128.
template <bool levels>
class AmxCodes {
 public:
  using Unit = Amx::WholeTiles;

  static constexpr std::size_t bytes(int n, int elements) { return std::size_t(n) * padded(elements); }
  static constexpr int depth(int elements) { return padded(elements) / kQuad; }
  static constexpr float step(int bits) { return centred(bits) ? 0.5f : 1.0f; }
  static constexpr float offset(int bits) { return centred(bits) ? 0.0f : -0.5f; }
  static constexpr bool centred(int bits) { return bits <= kNarrow; }

  // Codes in [elements / 4][n / 16] vectors to rows [n, 64 · steps], filled up with 0.
  static void arrange(const std::uint8_t* wide, int bits, int n, int elements, std::uint8_t* out) {
    const int blocks = n / kLanes, quads = elements / kQuad, stride = padded(elements);
    const auto twice = Amx::splat_int(centred(bits) ? -1 : 0);
    const auto less = Amx::splat_int(0x01010101 * (centred(bits) ? (1 << bits) - 1 : 128));
    for (int b = 0; b < blocks; ++b) {
      for (int q = 0; q < quads; q += kLanes) {
        Amx::F words[kLanes];
        unrolled<kLanes>([&](auto i) {
          auto codes = Amx::zero_int();
          if (q + i < quads) {
            codes = Amx::load_int(wide + ((q + i) * blocks + b) * kVectorBytes);
            if (levels) codes = _mm512_sub_epi8(_mm512_add_epi8(codes, _mm512_and_si512(codes, twice)), less);
          }
          words[i] = _mm512_castsi512_ps(codes);
        });
        Amx::transpose(words);
        unrolled<kLanes>([&](auto i) {
          Amx::store(reinterpret_cast<float*>(out + (b * kLanes + i) * stride + q * kQuad), words[i]);
        });
      }
    }
  }

  template <int bits, int NV>
  static void products(const std::uint8_t* codes, int n, int elements, const std::uint8_t* rows, std::int32_t* out) {
    Amx::Step steps[kMaxHeadDim / 64];
    const int count = padded(elements) / 64;
    for (int i = 0; i < count; ++i) steps[i] = {64 * i, kLanes * 64 * i};
    constexpr auto kind = levels ? Amx::Product::kCodes : Amx::Product::kUnsignedCodes;
    Amx::lane_products<kind, NV, false>(codes, padded(elements), n, steps, count, rows, out);
  }

 private:
  static constexpr int padded(int elements) { return (elements + 63) / 64 * 64; }
};

}  // namespace hack
