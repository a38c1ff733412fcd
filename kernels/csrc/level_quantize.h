// FP16 rows to levels, bit-equal to the definition in level_format.py. Lanes are tokens, so that every sum runs over the
// channels in their order.
#pragma once

#include "arena.h"
#include "half.h"
#include "level_format.h"
#include "layout.h"

namespace hack {

inline constexpr int kLevelFits = 3;
inline constexpr float kTinyHalf = 0x1p-24f;

// Distance of levels that loses least of a normal variable of variance 1.
constexpr float level_step(int bits) {
  return bits == 2 ? 0.9957f : bits == 3 ? 0.586f : bits == 4 ? 0.3352f : 0.031f;
}

template <class S>
[[gnu::always_inline]] inline typename S::F nearest_level(typename S::F x, typename S::F most) {
  return S::max(S::min(S::add(S::floor(x), S::splat(0.5f)), most), S::sub(S::zero(), most));
}

// 16 rows [16, D] -> x [D][16].
template <class S>
void turn_rows(const std::uint16_t* rows, int d, float* x) {
  alignas(64) float row[kLanes];
  for (int t = 0; t < kLanes; ++t) {
    for (int i = 0; i < d; i += kLanes) {
      S::store(row, S::load_half(rows + t * d + i));
      for (int l = 0; l < kLanes; ++l) x[(i + l) * kLanes + t] = row[l];
    }
  }
}

// The scale of each of 16 rows x [D][16], as FP16 holds it.
template <class S>
typename S::F level_scales(const float* x, int d, int bits) {
  const auto most = S::splat(zero_point(bits)), tiny = S::splat(kTinyHalf), largest = S::splat(kMaxHalf);
  auto squares = S::zero();
  for (int i = 0; i < d; ++i) squares = S::add(squares, S::mul(S::load(x + i * kLanes), S::load(x + i * kLanes)));
  alignas(64) float mean[kLanes];
  S::store(mean, S::div(squares, S::splat(float(d))));
  for (float& m : mean) m = __builtin_sqrtf(m);
  auto scale = S::max(S::mul(S::load(mean), S::splat(level_step(bits))), tiny);
  for (int fit = 0; fit < kLevelFits; ++fit) {
    const auto steps = S::div(S::splat(1.0f), scale);
    auto dots = S::zero(), norm = S::zero();
    for (int i = 0; i < d; ++i) {
      const auto value = S::load(x + i * kLanes), level = nearest_level<S>(S::mul(value, steps), most);
      dots = S::add(dots, S::mul(level, value));
      norm = S::add(norm, S::mul(level, level));
    }
    scale = S::max(S::div(dots, norm), tiny);
  }
  std::uint16_t half[kLanes];
  S::store_half(half, S::min(scale, largest));
  return S::max(S::load_half(half), tiny);
}

// Codes of 16 rows x [D][16] with their scales, as floats in place; `gains` [D][D] or null.
template <class S>
void round_levels(float* x, int d, int bits, typename S::F scale, const float* gains, float* turned) {
  const auto most = S::splat(zero_point(bits)), steps = S::div(S::splat(1.0f), scale);
  for (int i = 0; i < d; ++i) S::store(x + i * kLanes, S::mul(S::load(x + i * kLanes), steps));
  if (gains != nullptr) std::memcpy(turned, x, sizeof(float) * kLanes * std::size_t(d));
  for (int i = d - 1; i >= 0; --i) {
    float* at = x + i * kLanes;
    const auto level = nearest_level<S>(S::load(gains == nullptr ? at : turned + i * kLanes), most);
    if (gains != nullptr) {
      const auto error = S::sub(S::load(at), level);
      const float* gain = gains + std::size_t(i) * d;
      for (int j = 0; j < i; ++j) {
        float* to = turned + j * kLanes;
        S::store(to, S::add(S::load(to), S::mul(error, S::splat(gain[j]))));
      }
    }
    S::store(at, S::add(level, most));
  }
}

// One page of rows [Π, D] -> codes [Π, D], a byte each, and FP16 scales [Π].
template <class S>
void quantize_levels(const LevelFormat& fmt, const std::uint16_t* rows, int bits, const float* gains,
                     std::uint8_t* codes, std::uint16_t* scales, Arena<S> arena) {
  const int d = fmt.head_dim;
  float* x = arena.template take<float>(std::size_t(d) * kLanes);
  float* turned = arena.template take<float>(std::size_t(d) * kLanes);
  for (int t = 0; t < fmt.page_tokens; t += kLanes) {
    turn_rows<S>(rows + std::size_t(t) * d, d, x);
    const auto scale = level_scales<S>(x, d, bits);
    S::store_half(scales + t, scale);
    round_levels<S>(x, d, bits, scale, gains, turned);
    for (int i = 0; i < d; ++i) {
      std::uint8_t lanes[kLanes];
      S::store_low_bytes(lanes, S::truncate(S::load(x + i * kLanes)));
      for (int l = 0; l < kLanes; ++l) codes[(t + l) * d + i] = lanes[l];
    }
  }
}

// The plane of codes of `bits` bits, and of 3 bits the plane of the highest.
template <class S, bool of_k>
void pack_levels(const PageFormat& fmt, int bits, std::uint8_t* codes, const BasicLevels<std::uint8_t, std::uint16_t>& to,
                 std::uint8_t* high) {
  const auto pack = [&](auto width, const std::uint8_t* from, std::uint8_t* plane) {
    if constexpr (of_k)
      pack_k<S, width>(fmt, from, plane);
    else
      pack_v<S, width>(fmt, from, plane);
  };
  with_level_bits(bits, [&](auto constant) {
    constexpr int low = low_bits(constant);
    if constexpr (constant == 3) {
      for (std::size_t i = 0; i < fmt.elements(); ++i) {
        high[i] = codes[i] >> 2;
        codes[i] &= 3;
      }
      pack(std::integral_constant<int, 1>{}, high, to.high);
    }
    pack(std::integral_constant<int, low>{}, codes, to.codes);
  });
}

}  // namespace hack
