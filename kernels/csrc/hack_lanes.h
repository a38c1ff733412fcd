// Prefill on pages of codes in the symmetric form: codes are unpacked once into bytes, rows lie in lanes (lanes.h).
// Codes of Q and of P equal those of decode to the bit.
#pragma once

#include "code_lanes.h"
#include "exact_lanes.h"
#include "tile.h"

namespace hack {

template <class S, class Codes>
class HackLanes {
 public:
  static constexpr std::size_t scratch_bytes(const HackFormat& fmt, int rows) {
    const std::size_t padded = lane_rows(rows), d = fmt.head_dim, pi = fmt.page_tokens, g = fmt.k_groups();
    const std::size_t pages = fmt.elements() + g * Codes::bytes(int(pi), fmt.k_partition) + Codes::bytes(int(d), int(pi));
    const std::size_t tile = S::kLaneVectors * kLanes * (4 * (d > pi ? d : pi) + 4 * Codes::depth(int(pi)));
    return padded * g * (4 * Codes::depth(fmt.k_partition) + 8) + pages + 8 * (g * pi + d) + tile + 64 * 16;
  }

  HackLanes(const HackFormat& fmt, const HackQuery& query, Arena<S>& arena)
      : fmt_(fmt), padded_(lane_rows(query.rows)), tile_of_q_(4 * Codes::depth(fmt.k_partition)) {
    const int d = fmt.head_dim, pi = fmt.page_tokens, groups = fmt.k_groups(), z = fmt.k_partition;
    const auto floats = [&](std::size_t n) { return arena.template take<float>(n); };
    const auto bytes = [&](std::size_t n) { return arena.template take<std::uint8_t>(n); };
    q_ = bytes(std::size_t(groups) * padded_ * tile_of_q_);
    scale_ = floats(std::size_t(groups) * padded_);
    sums_ = floats(std::size_t(groups) * padded_);
    unpacked_ = bytes(fmt.elements());
    k_ = bytes(groups * Codes::bytes(pi, z));
    v_ = bytes(Codes::bytes(d, pi));
    k_min_ = floats(fmt.k_meta());
    k_scale_ = floats(fmt.k_meta());
    v_min_ = floats(fmt.v_meta());
    v_scale_ = floats(fmt.v_meta());
    p_ = bytes(4 * std::size_t(S::kLaneVectors) * kLanes * Codes::depth(pi));
    dots_ = arena.template take<std::int32_t>(std::size_t(S::kLaneVectors) * kLanes * (d > pi ? d : pi));
    std::memset(p_, 0, 4 * std::size_t(S::kLaneVectors) * kLanes * Codes::depth(pi));
    for (int g = 0; g < groups; ++g) {
      to_lanes<S>(reinterpret_cast<const std::byte*>(query.codes + g * z), d, query.rows, z / kQuad, Codes::depth(z),
                  reinterpret_cast<std::byte*>(q_ + std::size_t(g) * padded_ * tile_of_q_));
      for (int r = 0; r < padded_; ++r) {
        scale_[g * padded_ + r] = r < query.rows ? query.scale[g * query.padded + r] : 1.0f;
        sums_[g * padded_ + r] = r < query.rows ? query.sums[g * query.padded + r] : 0.0f;
      }
    }
  }

  // Attention of all rows to the page; `scores` is [Π, NV, 16].
  void attend(const ConstHackPage& page, int rows, const LaneState& state, float* scores) {
    open(page);
    CodeWidths::with(fmt_.k_bits, [&](auto k_bits) {
      CodeWidths::with(fmt_.v_bits, [&](auto v_bits) {
        each_lane_tile<S>(rows, [&](int r0, auto vectors) {
          attend_tile<dot_bits<S>(k_bits, false), dot_bits<S>(v_bits, false), vectors>(r0, state, scores);
        });
      });
    });
  }

 private:
  void open(const ConstHackPage& page) {
    const int pi = fmt_.page_tokens, d = fmt_.head_dim, z = fmt_.k_partition;
    with_width<S>(fmt_.k_bits, [&](auto width) { width.widen(page.k_codes, pi, d, unpacked_); });
    for (int g = 0; g < fmt_.k_groups(); ++g)
      Codes::arrange(unpacked_ + g * z * pi, fmt_.k_bits, pi, z, k_ + g * Codes::bytes(pi, z));
    with_width<S>(fmt_.v_bits, [&](auto width) { width.widen(page.v_codes, d, pi, unpacked_); });
    Codes::arrange(unpacked_, fmt_.v_bits, d, pi, v_);
    widen_halves<S>(page.k_min, fmt_.k_meta(), k_min_);
    widen_halves<S>(page.k_scale, fmt_.k_meta(), k_scale_);
    widen_halves<S>(page.v_min, fmt_.v_meta(), v_min_);
    widen_halves<S>(page.v_scale, fmt_.v_meta(), v_scale_);
  }

  template <int k_bits, int v_bits, int NV>
  void attend_tile(int r0, const LaneState& state, float* scores) const {
    const int pi = fmt_.page_tokens, d = fmt_.head_dim, z = fmt_.k_partition, groups = fmt_.k_groups();
    typename S::F tops[NV], totals[NV];
    for (int g = 0; g < groups; ++g) {
      const auto* rows = q_ + std::size_t(g * padded_ + r0) * tile_of_q_;
      Codes::template products<k_bits, NV>(k_ + g * Codes::bytes(pi, z), pi, z, rows, dots_);
      add_scores<NV>(g, r0, scores, tops);
    }
    lift_tops<S, NV>(fmt_, state, r0, tops);
    weigh<NV>(scores, tops, totals);
    Codes::template products<v_bits, NV>(v_, d, pi, p_, dots_);
    merge<NV>(r0, state, tops, totals);
  }

  // Adds partition g's share to the scores. `tops` become the largest scores so far.
  template <int NV>
  void add_scores(int g, int r0, float* scores, typename S::F (&tops)[NV]) const {
    const int pi = fmt_.page_tokens;
    typename S::F scale[NV], sums[NV];
    unrolled<NV>([&](auto v) {
      scale[v] = S::load(scale_ + g * padded_ + r0 + v * kLanes);
      sums[v] = S::load(sums_ + g * padded_ + r0 + v * kLanes);
      tops[v] = S::splat(kUnseen);
    });
    for (int t = 0; t < pi; ++t) {
      const auto of_token = S::splat(k_scale_[g * pi + t]), minimum = S::splat(k_min_[g * pi + t]);
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        const int at = (t * NV + v) * kLanes;
        const auto before = g == 0 ? S::zero() : S::load(scores + at);
        const auto share = S::fma(of_token, S::to_float(S::load_int(dots_ + at)), S::mul(minimum, sums[v]));
        const auto score = S::fma(scale[v], share, before);
        S::store(scores + at, score);
        tops[v] = S::max(tops[v], score);
      });
    }
  }

  // Turns scores into codes in 0..127, four tokens to a word. `totals` become the sums of the codes.
  template <int NV>
  void weigh(const float* scores, const typename S::F (&tops)[NV], typename S::F (&totals)[NV]) const {
    typename S::I total[NV];
    for (auto& each : total) each = S::zero_int();
    for (int t = 0; t < fmt_.page_tokens; t += kQuad) {
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        typename S::I codes[kQuad];
        unrolled<kQuad>([&](auto i) __attribute__((always_inline)) {
          const auto below = S::sub(S::load(scores + ((t + i) * NV + v) * kLanes), tops[v]);
          codes[i] = S::nearest(exp2<S, 4, int(kSymmetricLevels)>(below));
        });
        const auto quads = S::quads_of(codes[0], codes[1], codes[2], codes[3]);
        total[v] = S::dot(total[v], S::splat_int(0x01010101), quads);
        S::store_int(p_ + (t / kQuad * NV + v) * kVectorBytes, quads);
      });
    }
    unrolled<NV>([&](auto v) { totals[v] = S::to_float(total[v]); });
  }

  // Adds the page's weights and products with V to the state.
  template <int NV>
  void merge(int r0, const LaneState& state, const typename S::F (&tops)[NV], const typename S::F (&totals)[NV]) const {
    typename S::F take[NV];
    unrolled<NV>([&](auto v) {
      float *top = state.top + r0 + v * kLanes, *weight = state.weight + r0 + v * kLanes;
      take[v] = S::mul(exp2<S>(S::sub(tops[v], S::load(top))), S::splat(1.0f / kSymmetricLevels));
      S::store(weight, S::fma(take[v], totals[v], S::load(weight)));
    });
    float* out = state.out + std::size_t(r0) * fmt_.head_dim;
    for (int i = 0; i < fmt_.head_dim; ++i) {
      const auto scale = S::splat(v_scale_[i]), minimum = S::splat(v_min_[i]);
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        const int at = (i * NV + v) * kLanes;
        const auto value = S::fma(scale, S::to_float(S::load_int(dots_ + at)), S::mul(minimum, totals[v]));
        S::store(out + at, S::fma(take[v], value, S::load(out + at)));
      });
    }
  }

  const HackFormat& fmt_;
  int padded_;
  int tile_of_q_;      // bytes of a row of a tile
  std::uint8_t* q_;    // [G], tiles [depth, NV, 16, 4]
  float* scale_;       // [G, R]
  float* sums_;        // [G, R] Σ codes
  std::uint8_t* unpacked_;
  std::uint8_t* k_;    // [G] in the order of `Codes`
  std::uint8_t* v_;
  float* k_min_;       // [G, Π]
  float* k_scale_;
  float* v_min_;       // [D]
  float* v_scale_;
  std::uint8_t* p_;    // [Π / 4, NV, 16, 4], zeros up to the depth of the products
  std::int32_t* dots_;
};

}  // namespace hack
