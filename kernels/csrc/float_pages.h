// Kind::kFloats: pages of FP8, FP6 and FP4, upcast where they are read.
//
// A code's exponent and mantissa become those of an FP16 number, which the processor widens, subnormals included; the
// difference of the two biases goes into the scale.
#pragma once

#include <limits>

#include "float_format.h"
#include "rows.h"

namespace hack {

inline constexpr int kHalfBias = 15;

// 2^n for n in -126..127
[[gnu::always_inline]] constexpr float power_of_two(int n) {
  return std::bit_cast<float>(std::uint32_t(n + 127) << 23);
}

template <class S, int exponent, int mantissa>
struct FloatRows {
  PackedRows<S, 1 + exponent + mantissa> codes;
  const float* scale;  // [Π, D / block], or one
  int row_scales;      // scales from one row to the next
  int block_shift;

  [[gnu::always_inline]] typename S::F at(int t, int c) const {
    const auto value = S::template small_floats<exponent, mantissa>(codes.at(t, c));
    return S::mul(value, S::splat(scale[t * row_scales + (c >> block_shift)]));
  }
  [[gnu::always_inline]] void fetch(int t, int c) const { codes.fetch(t, c); }
};

// Factors of the blocks of K or V of a page. They include the difference of biases.
template <class S>
void read_scales(const FloatFormat& fmt, const ConstFloats& side, float* scales) {
  const float unbias = power_of_two(kHalfBias - fmt.element.bias());
  const int count = int(fmt.blocks());
  switch (fmt.scaling) {
    case Scaling::kPage:
      scales[0] = *side.whole * unbias;
      return;
    case Scaling::kPower:
      for (int i = 0; i < count; ++i) {
        const std::uint32_t exponent = std::uint32_t(side.scale[i]) << 23;
        scales[i] = std::bit_cast<float>(exponent != 0 ? exponent : 0x00400000u) * unbias;
      }
      return;
    case Scaling::kTwofold: {
      const float gain = *side.whole * unbias * power_of_two(kHalfBias - kE4M3.bias());
      for (int i = 0; i < count; i += kLanes) {
        const auto values = S::template small_floats<4, 3>(S::load_bytes(side.scale + i));
        S::store(scales + i, S::mul(values, S::splat(gain)));
      }
      return;
    }
  }
}

template <class S>
class FloatPages {
 public:
  static constexpr int kRestingRows = 8;

  FloatPages(const PageFormat& format, const Pool& pool, int head, Arena<S>& arena)
      : fmt_(as_floats(format)),
        pool_(pool),
        head_(head),
        k_scale_(arena.template take<float>(fmt_.blocks())),
        v_scale_(arena.template take<float>(fmt_.blocks())) {
    const bool one = fmt_.scaling == Scaling::kPage;
    row_scales_ = one ? 0 : fmt_.head_dim / fmt_.block;
    shift_ = one ? 31 : std::countr_zero(unsigned(fmt_.block));
  }

  void open(std::int64_t id, std::int64_t next) {
    page_ = float_sides<ConstFloats>(fmt_, pool_.page(fmt_, id, head_));
    next_ = float_sides<ConstFloats>(fmt_, pool_.page(fmt_, next, head_));
    read_scales<S>(fmt_, page_.k, k_scale_);
    read_scales<S>(fmt_, page_.v, v_scale_);
  }
  template <class Use>
  [[gnu::always_inline]] void with_keys(Use use) const {
    with_readers(page_.k, next_.k, k_scale_, use);
  }
  template <class Use>
  [[gnu::always_inline]] void with_values(Use use) const {
    with_readers(page_.v, next_.v, v_scale_, use);
  }

 private:
  template <class Use>
  [[gnu::always_inline]] void with_readers(const ConstFloats& side, const ConstFloats& next, const float* scale,
                                           Use use) const {
    const auto with = [&](auto shape) __attribute__((always_inline)) {
      const auto reader = [&](const ConstFloats& of) -> FloatRows<S, (shape >> 4), (shape & 15)> {
        return {{of.codes, of.high, fmt_.head_dim}, scale, row_scales_, shift_};
      };
      use(reader(side), reader(next));
    };
    FloatShapes::with(fmt_.element.shape(), with);
  }

  const FloatFormat& fmt_;
  const Pool& pool_;
  int head_;
  float* k_scale_;
  float* v_scale_;
  int row_scales_ = 0, shift_ = 0;
  FloatSides<ConstFloats> page_{}, next_{};
};

// The code of a finite number: to nearest, ties to even, saturating.
template <class S>
[[gnu::always_inline]] inline std::uint8_t encode_float(const SmallFloat& of, float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), sign = bits >> 31;
  const float size = std::bit_cast<float>(bits & 0x7FFFFFFFu);
  const float clamped = size < of.largest ? size : of.largest;
  // The exponent of the value's binade, whose step is 2^-mantissa_bits times its least number. Subnormals take the
  // exponent of the smallest normal.
  const std::uint32_t least = std::uint32_t(128 - of.bias()) << 23;
  const std::uint32_t own = std::bit_cast<std::uint32_t>(clamped) & 0x7F800000u, exponent = own > least ? own : least;
  // The last bit of numbers in the binade of `shift` is one step. So the sum rounds to steps and counts them in low
  // bits.
  const std::uint32_t shift = exponent + (std::uint32_t(23 - of.mantissa_bits) << 23) + 0x00400000u;
  const std::uint32_t steps = std::bit_cast<std::uint32_t>(clamped + std::bit_cast<float>(shift)) - shift;
  const std::uint32_t code = (((exponent - least) >> 23) << of.mantissa_bits) + steps;
  return std::uint8_t(code | (sign << (of.bits() - 1)));
}

template <class S>
void encode_floats(SmallFloat of, const float* __restrict x, float step, int n, std::uint8_t* __restrict codes) {
  for (int i = 0; i < n; ++i) codes[i] = encode_float<S>(of, x[i] / step);
}

// The largest magnitude of n values, a multiple of 16.
template <class S>
float largest_of(const float* x, int n) {
  auto most = S::zero();
  for (int i = 0; i < n; i += kLanes) {
    const auto values = S::load(x + i);
    most = S::max(S::max(values, S::sub(S::zero(), values)), most);
  }
  return S::reduce_max(most);
}

// Quantizes K or V of a page; reference/floats.py has the definition.
template <class S>
void quantize_floats(const FloatFormat& fmt, const std::uint16_t* rows, const Floats& to, Arena<S> arena) {
  const int n = int(fmt.elements()), d = fmt.head_dim, size = fmt.block;
  float* x = arena.template take<float>(std::size_t(n));
  auto* codes = arena.template take<std::uint8_t>(std::size_t(n));
  for (int i = 0; i < n; i += kLanes) S::store(x + i, S::load_half(rows + i));
  float whole = 1.0f;
  if (to.whole != nullptr) {
    const float largest = largest_of<S>(x, n);
    const float most = fmt.scaling == Scaling::kPage ? fmt.element.largest : kE4M3.largest * fmt.element.largest;
    whole = largest / most;
    // If the division rounded down, the largest value would lie beyond the element's largest.
    if (fmt.scaling == Scaling::kPage && whole * most < largest)
      whole = std::bit_cast<float>(std::bit_cast<std::uint32_t>(whole) + 1);
    if (whole == 0.0f) whole = 1.0f;
    *to.whole = whole;
  }
  const int top = int(std::bit_cast<std::uint32_t>(fmt.element.largest) >> 23) - 127;  // its exponent
  for (int b = 0; b < n / size; ++b) {
    const float* block = x + b * size;
    float step = whole;
    if (fmt.scaling == Scaling::kPower) {
      const int exponent = int(std::bit_cast<std::uint32_t>(largest_of<S>(block, size)) >> 23) - top;
      to.scale[b] = std::uint8_t(exponent > 0 ? exponent : 0);
      step = exponent > 0 ? power_of_two(exponent - 127) : 1.0f;
    } else if (fmt.scaling == Scaling::kTwofold) {
      const std::uint8_t code = encode_float<S>(kE4M3, largest_of<S>(block, size) / (fmt.element.largest * whole));
      to.scale[b] = code;
      step = half_to_float(std::uint16_t(code << 7)) * power_of_two(kHalfBias - kE4M3.bias()) * whole;
      if (step == 0.0f) step = std::numeric_limits<float>::infinity();
    }
    encode_floats<S>(fmt.element, block, step, size, codes + b * size);
  }
  pack_rows<S>(codes, fmt.page_tokens, d, fmt.element.bits(), to.codes, to.high);
}

template <class S>
void seal_floats(const PageFormat& format, Place, const std::uint16_t* k, const std::uint16_t* v, const Planes& planes,
                 std::byte* scratch) {
  const FloatFormat& fmt = as_floats(format);
  const auto page = float_sides<Floats>(fmt, planes);
  quantize_floats<S>(fmt, k, page.k, Arena<S>(scratch));
  quantize_floats<S>(fmt, v, page.v, Arena<S>(scratch));
}

template <class S>
constexpr std::size_t float_scratch_bytes(const PageFormat& format, int rows) {
  const std::size_t scales = 8 * as_floats(format).blocks();
  return rows_scratch_bytes<S>(format, rows) + scales + 64 * 4;
}

template <class S>
constexpr PageOperations float_operations() {
  return reading_operations<S, FloatPages<S>>(seal_floats<S>, float_scratch_bytes<S>);
}

}  // namespace hack
