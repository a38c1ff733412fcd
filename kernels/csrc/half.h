// Scalar FP16 and BF16, for single values and for machines without conversion instructions.
//
// Always inlined: the units for different processors must not share one compiled copy of a function.
#pragma once

#include <bit>
#include <cstdint>

namespace hack {

[[gnu::always_inline]] inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1Fu, mantissa = h & 0x3FFu;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float tiny = float(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(tiny));
}

// To nearest, ties to even; magnitudes beyond FP16 become infinite.
[[gnu::always_inline]] inline std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint16_t sign = std::uint16_t((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00u;
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 puts the rounded mantissa into the low bits
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return std::uint16_t(sign | (std::bit_cast<std::uint32_t>(shifted) & 0x7FFu));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return std::uint16_t(sign | ((magnitude - 0x38000000u + 0xFFFu + odd) >> 13));
}

// Smallest FP16 not below a value that is zero or positive.
[[gnu::always_inline]] inline std::uint16_t float_to_half_up(float value) {
  const std::uint16_t nearest = float_to_half(value);
  return half_to_float(nearest) < value ? std::uint16_t(nearest + 1) : nearest;
}

[[gnu::always_inline]] inline float bfloat_to_float(std::uint16_t b) {
  return std::bit_cast<float>(std::uint32_t(b) << 16);
}

[[gnu::always_inline]] inline std::uint16_t float_to_bfloat(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return std::uint16_t((bits >> 16) | 0x40u);
  return std::uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace hack
