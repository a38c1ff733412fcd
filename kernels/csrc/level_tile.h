// Prefill on pages of levels: codes are unpacked once into bytes, rows lie in lanes (lanes.h). Codes of Q and of P
// equal those of decode to the bit.
#pragma once

#include "code_lanes.h"
#include "exact_lanes.h"
#include "layout.h"
#include "level_query.h"
#include "level_scales.h"
#include "tile.h"

namespace hack {

// One page of one KV head, a byte per code, in the order of `CodeLanes`.
struct WideLevels {
  std::uint8_t* k;
  std::uint8_t* v;
  float* k_scale;  // [Π], times the step of the bytes
  float* v_scale;
};

// Codes [lanes, elements] in packed vectors -> [elements / 4][blocks] vectors of bytes; as widen_codes.
template <class S, bool of_k>
void widen_levels(int bits, const BasicLevels<const std::uint8_t>& from, int lanes, int elements,
                  std::uint8_t* wide) {
  LevelWidths::with(bits, [&](auto constant) {
    if constexpr (constant != 3) {
      widen_codes<S, constant>(from.codes, lanes, elements, wide);
    } else {
      constexpr int kBlocks = of_k ? 2 : 1, kVectors = of_k ? 1 : 2;  // that share a vector of highest bits
      const int blocks = lanes / kLanes, chunks = elements / chunk_of(2);
      const std::uint8_t* high = from.high;
      for (int b = 0; b < blocks; b += kBlocks) {
        for (int c = 0; c < chunks; c += kVectors, high += kVectorBytes) {
          const auto tops = S::load_int(high);
          unrolled<8>([&](auto f) __attribute__((always_inline)) {
            const int block = b + (of_k ? f / 4 : 0), chunk = c + (of_k ? 0 : f / 4);
            const auto low = S::template plane<2, f % 4>(S::load_int(from.codes + (block * chunks + chunk) * kVectorBytes));
            S::store_int(wide + ((chunk * 4 + f % 4) * blocks + block) * kVectorBytes, S::template with_high<f>(low, tops));
          });
        }
      }
    }
  });
}

// A query and a page of levels, in lanes.
template <class S, class Codes>
class LevelLanes {
 public:
  static constexpr std::size_t scratch_bytes(const LevelFormat& fmt, int rows) {
    const std::size_t padded = lane_rows(rows), d = fmt.head_dim, pi = fmt.page_tokens;
    const std::size_t pages = fmt.elements() + Codes::bytes(int(pi), int(d)) + Codes::bytes(int(d), int(pi));
    const std::size_t tile = S::kLaneVectors * kLanes * (4 * d + 4 * Codes::depth(int(pi)));
    return padded * (4 * Codes::depth(int(d)) + 8) + pages + 8 * pi + tile + 64 * 12;
  }

  LevelLanes(const LevelFormat& fmt, const LevelQuery& query, Arena<S>& arena) : fmt_(fmt) {
    const int d = fmt.head_dim, pi = fmt.page_tokens, padded = lane_rows(query.rows);
    const auto floats = [&](std::size_t n) { return arena.template take<float>(n); };
    const auto bytes = [&](std::size_t n) { return arena.template take<std::uint8_t>(n); };
    q_ = bytes(4 * std::size_t(padded) * Codes::depth(d));
    scale_ = floats(padded);
    correction_ = floats(padded);
    unpacked_ = bytes(fmt.elements());
    wide_ = {bytes(Codes::bytes(pi, d)), bytes(Codes::bytes(d, pi)), floats(pi), floats(pi)};
    p_ = bytes(4 * std::size_t(S::kLaneVectors) * kLanes * Codes::depth(pi));
    dots_ = arena.template take<std::int32_t>(std::size_t(S::kLaneVectors) * kLanes * d);
    std::memset(p_, 0, 4 * std::size_t(S::kLaneVectors) * kLanes * Codes::depth(pi));
    to_lanes<S>(reinterpret_cast<const std::byte*>(query.codes), d, query.rows, d / kQuad, Codes::depth(d),
                reinterpret_cast<std::byte*>(q_));
    for (int r = 0; r < padded; ++r) {
      scale_[r] = r < query.rows ? query.scale[r] : 1.0f;
      correction_[r] = r < query.rows ? Codes::offset(fmt.k_bits) * query.sums[r] : 0.0f;
    }
  }

  // Attention of all rows to the page; `scores` is [Π, NV, 16].
  void attend(const ConstLevelPage& page, int rows, const LaneState& state, float* scores) {
    open(page);
    LevelWidths::with(fmt_.k_bits, [&](auto k_bits) {
      LevelWidths::with(fmt_.v_bits, [&](auto v_bits) {
        each_lane_tile<S>(rows, [&](int r0, auto vectors) { attend_tile<k_bits, v_bits, vectors>(r0, state, scores); });
      });
    });
  }

 private:
  void open(const ConstLevelPage& page) {
    const int pi = fmt_.page_tokens, d = fmt_.head_dim;
    widen_levels<S, true>(fmt_.k_bits, page.k, pi, d, unpacked_);
    Codes::arrange(unpacked_, fmt_.k_bits, pi, d, wide_.k);
    widen_levels<S, false>(fmt_.v_bits, page.v, d, pi, unpacked_);
    Codes::arrange(unpacked_, fmt_.v_bits, d, pi, wide_.v);
    const auto step = S::splat(Codes::step(fmt_.k_bits));
    for (int t = 0; t < pi; t += kLanes) {
      S::store(wide_.k_scale + t, S::mul(load_row_scales<S>(fmt_, page.k.scale, t), step));
      S::store(wide_.v_scale + t, load_row_scales<S>(fmt_, page.v.scale, t));
    }
  }

  template <int k_bits, int v_bits, int NV>
  void attend_tile(int r0, const LaneState& state, float* scores) const {
    const int pi = fmt_.page_tokens, d = fmt_.head_dim;
    typename S::F tops[NV], most[NV], sums[NV], totals[NV];
    Codes::template products<k_bits, NV>(wide_.k, pi, d, q_ + 4 * std::size_t(r0) * Codes::depth(d),
                                         reinterpret_cast<std::int32_t*>(scores));
    scale_products<k_bits, NV>(r0, scores, tops);
    lift_tops<S, NV>(fmt_, state, r0, tops);
    weigh<NV>(r0, scores, tops, most, sums);
    round_weights<!Codes::centred(v_bits), NV>(scores, most, totals);
    Codes::template products<v_bits, NV>(wide_.v, d, pi, p_, dots_);
    merge<v_bits, NV>(r0, state, tops, most, sums, totals);
  }

  // Multiplies the integer products by the tokens' scales, but not yet by the rows' scales. `tops` are the largest
  // scores, with both.
  template <int bits, int NV>
  void scale_products(int r0, float* scores, typename S::F (&tops)[NV]) const {
    typename S::F correction[NV];
    unrolled<NV>([&](auto v) {
      correction[v] = S::load(correction_ + r0 + v * kLanes);
      tops[v] = S::splat(kUnseen);
    });
    for (int t = 0; t < fmt_.page_tokens; ++t) {
      const auto of_token = S::splat(wide_.k_scale[t]);
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        float* at = scores + (t * NV + v) * kLanes;
        auto exact = S::to_float(S::load_int(at));
        if constexpr (!Codes::centred(bits)) exact = S::sub(exact, correction[v]);
        const auto product = S::mul(exact, of_token);
        S::store(at, product);
        tops[v] = S::max(tops[v], product);
      });
    }
    unrolled<NV>([&](auto v) { tops[v] = S::mul(tops[v], S::load(scale_ + r0 + v * kLanes)); });
  }

  // Turns the products of `scale_products` into weights p times the token's scale of V. `sums` are Σ p, and `most` the
  // largest of these weights.
  template <int NV>
  void weigh(int r0, float* scores, const typename S::F (&tops)[NV], typename S::F (&most)[NV],
             typename S::F (&sums)[NV]) const {
    typename S::F scale[NV], below[NV];
    unrolled<NV>([&](auto v) {
      scale[v] = S::load(scale_ + r0 + v * kLanes);
      below[v] = S::sub(S::zero(), tops[v]);
      most[v] = sums[v] = S::zero();
    });
    for (int t = 0; t < fmt_.page_tokens; ++t) {
      const auto of_token = S::splat(wide_.v_scale[t]);
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        float* at = scores + (t * NV + v) * kLanes;
        const auto p = exp2<S>(S::fma(S::load(at), scale[v], below[v]));
        const auto w = S::mul(p, of_token);
        sums[v] = S::add(sums[v], p);
        most[v] = S::max(most[v], w);
        S::store(at, w);
      });
    }
  }

  // Turns weights into codes in 0..127, four tokens to a word. With `sum`, `totals` are the sums of the codes.
  template <bool sum, int NV>
  void round_weights(const float* weights, const typename S::F (&most)[NV], typename S::F (&totals)[NV]) const {
    typename S::F steps[NV];
    typename S::I total[NV];
    unrolled<NV>([&](auto v) {
      steps[v] = S::div(S::splat(kSymmetricLevels), most[v]);
      total[v] = S::zero_int();
    });
    for (int t = 0; t < fmt_.page_tokens; t += kQuad) {
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        typename S::I codes[kQuad];
        unrolled<kQuad>([&](auto i) {
          codes[i] = S::nearest(S::mul(S::load(weights + ((t + i) * NV + v) * kLanes), steps[v]));
        });
        const auto quads = S::quads_of(codes[0], codes[1], codes[2], codes[3]);
        if constexpr (sum) total[v] = S::dot(total[v], S::splat_int(0x01010101), quads);
        S::store_int(p_ + (t / kQuad * NV + v) * kVectorBytes, quads);
      });
    }
    unrolled<NV>([&](auto v) { totals[v] = S::to_float(total[v]); });
  }

  // Adds the page's weights and products with V to the state.
  template <int bits, int NV>
  void merge(int r0, const LaneState& state, const typename S::F (&tops)[NV], const typename S::F (&most)[NV],
             const typename S::F (&sums)[NV], const typename S::F (&totals)[NV]) const {
    typename S::F take[NV], correction[NV];
    unrolled<NV>([&](auto v) {
      float *top = state.top + r0 + v * kLanes, *weight = state.weight + r0 + v * kLanes;
      const auto factor = exp2<S>(S::sub(tops[v], S::load(top)));
      S::store(weight, S::fma(factor, sums[v], S::load(weight)));
      take[v] = S::mul(factor, S::mul(most[v], S::splat(Codes::step(bits) / kSymmetricLevels)));
      correction[v] = S::mul(totals[v], S::splat(Codes::offset(bits)));
    });
    float* out = state.out + std::size_t(r0) * fmt_.head_dim;
    for (int i = 0; i < fmt_.head_dim; ++i) {
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        const int at = (i * NV + v) * kLanes;
        auto exact = S::to_float(S::load_int(dots_ + at));
        if constexpr (!Codes::centred(bits)) exact = S::sub(exact, correction[v]);
        S::store(out + at, S::fma(take[v], exact, S::load(out + at)));
      });
    }
  }

  const LevelFormat& fmt_;
  std::uint8_t* q_;       // tiles [depth, NV, 16, 4]
  float* scale_;          // [R]
  float* correction_;     // [R] offset · Σ codes
  std::uint8_t* unpacked_;
  WideLevels wide_;
  std::uint8_t* p_;       // [Π / 4, NV, 16, 4], zeros up to the depth of the products
  std::int32_t* dots_;    // [D, NV, 16]
};

}  // namespace hack
