// Scales of rows of levels as they rest: FP16, or bytes that are the upper bits of FP16 (level_format.py).
#pragma once

#include "level_format.h"

namespace hack {

inline constexpr int kScaleShift = 7;  // of a byte to the bits of FP16
inline constexpr int kLeastScale = 1;
inline constexpr int kMostScale = 247;  // the largest byte that is a finite FP16

// Positive FP16 to the nearest byte, ties to the even one.
[[gnu::always_inline]] inline std::uint8_t byte_of_half(std::uint16_t half) {
  const int odd = half >> kScaleShift & 1, below_half = (1 << (kScaleShift - 1)) - 1;
  const int nearest = (half + below_half + odd) >> kScaleShift;
  return std::uint8_t(nearest < kLeastScale ? kLeastScale : nearest > kMostScale ? kMostScale : nearest);
}

[[gnu::always_inline]] inline std::uint16_t half_of_byte(std::uint8_t byte) {
  return std::uint16_t(byte << kScaleShift);
}

// The scales of 16 rows of a page from row t on. The page's scales begin at `scales`.
template <class S>
[[gnu::always_inline]] inline typename S::F load_row_scales(const LevelFormat& fmt, const std::uint8_t* scales, int t) {
  const std::uint8_t* at = fmt.scale_of(scales, t);
  if (!fmt.narrow_scales) return S::load_half(reinterpret_cast<const std::uint16_t*>(at));
  alignas(32) std::uint16_t half[kLanes];
  for (int i = 0; i < kLanes; ++i) half[i] = half_of_byte(at[i]);
  return S::load_half(half);
}

// Stores scales that `stored_scale` has rounded.
template <class S>
void store_row_scales(const LevelFormat& fmt, std::uint8_t* scales, int t, typename S::F scale) {
  std::uint8_t* at = fmt.scale_of(scales, t);
  if (!fmt.narrow_scales) return S::store_half(reinterpret_cast<std::uint16_t*>(at), scale);
  std::uint16_t half[kLanes];
  S::store_half(half, scale);
  for (int i = 0; i < kLanes; ++i) at[i] = std::uint8_t(half[i] >> kScaleShift);
}

}  // namespace hack
