// Prefill on pages of levels: codes are unpacked once into bytes, products are tiled as in tile.h.
#pragma once

#include "level_query.h"
#include "tile.h"

namespace hack {

// One page of one KV head, a byte per code, in the order of WidePage.
struct WideLevels {
  std::uint8_t* k;
  std::uint8_t* v;
  float* k_scale;  // [Π]
  float* v_scale;
};

template <class S>
WideLevels make_wide_levels(const LevelFormat& fmt, Arena<S>& arena) {
  const auto bytes = [&] { return arena.template take<std::uint8_t>(fmt.elements()); };
  const auto floats = [&] { return arena.template take<float>(fmt.page_tokens); };
  auto *k = bytes(), *v = bytes();
  float *k_scale = floats(), *v_scale = floats();
  return {k, v, k_scale, v_scale};
}

// Codes [lanes, elements] in packed vectors -> [elements / 4][blocks] vectors of bytes; as widen_codes.
template <class S, bool of_k>
void widen_levels(int bits, const BasicLevels<const std::uint8_t, const std::uint16_t>& from, int lanes, int elements,
                  std::uint8_t* wide) {
  with_level_bits(bits, [&](auto constant) {
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

template <class S>
void widen_level_page(const LevelFormat& fmt, const ConstLevelPage& page, const WideLevels& wide) {
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  widen_levels<S, true>(fmt.k_bits, page.k, pi, d, wide.k);
  widen_levels<S, false>(fmt.v_bits, page.v, d, pi, wide.v);
  widen_halves<S>(page.k.scale, std::size_t(pi), wide.k_scale);
  widen_halves<S>(page.v.scale, std::size_t(pi), wide.v_scale);
}

// Scores of NR rows from r0 with NB blocks of tokens from t0; `scores` is [kTile, Π] and starts at row r0.
template <class S, int bits, int NR, int NB>
void level_score_tile(const LevelFormat& fmt, const WideLevels& wide, const LevelQuery& query, int r0, int t0,
                      float* scores) {
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  typename S::I dots[NR][NB];
  wide_dots<S, bits, NR, NB, false>(wide.k + t0 / kLanes * kVectorBytes, pi / kLanes, d / kQuad,
                                    reinterpret_cast<const std::uint8_t*>(query.codes + std::size_t(r0) * d), d, dots);
  const float zero = zero_point(fmt.k_bits);
  unrolled<NB>([&](auto b) __attribute__((always_inline)) {
    const auto scale = S::load(wide.k_scale + t0 + b * kLanes);
    unrolled<NR>([&](auto r) __attribute__((always_inline)) {
      const auto exact = S::sub(S::to_float(dots[r][b]), S::splat(zero * query.sums[r0 + r]));
      S::store(scores + r * pi + t0 + b * kLanes, S::mul(S::mul(exact, scale), S::splat(query.scale[r0 + r])));
    });
  });
}

template <class S, int bits, int NR, int NB>
void level_value_tile(const LevelFormat& fmt, const WideLevels& wide, const std::uint8_t* p, const LevelMerge* merges,
                      int d0, float* out) {
  const int pi = fmt.page_tokens;
  typename S::I dots[NR][NB];
  wide_dots<S, bits, NR, NB, false>(wide.v + d0 / kLanes * kVectorBytes, fmt.head_dim / kLanes, pi / kQuad, p, pi,
                                    dots);
  unrolled<NR * NB>([&](auto i) __attribute__((always_inline)) {
    constexpr int r = i / NB, b = i % NB;
    float* at = out + r * fmt.head_dim + d0 + b * kLanes;
    const auto exact = S::sub(S::to_float(dots[r][b]), S::splat(merges[r].correction));
    S::store(at, S::fma(S::splat(merges[r].take), exact, S::load(at)));
  });
}

// Attention of every row of the query to the page.
template <class S>
void attend_wide_levels(const LevelFormat& fmt, const WideLevels& wide, const LevelQuery& query, State& state,
                        Arena<S> arena) {
  constexpr int NR = S::kTileRows;
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  float* scores = arena.template take<float>(std::size_t(kTile) * pi);
  auto* codes = arena.template take<std::uint8_t>(std::size_t(kTile) * pi);
  const float zero = zero_point(fmt.v_bits);
  alignas(64) float tops[kTile], takes[kLanes];
  LevelWeights weights[kTile];
  LevelMerge merges[kTile];
  for (int r0 = 0; r0 < query.rows; r0 += kTile) {
    with_level_bits(fmt.k_bits, [&](auto bits) {
      constexpr int width = dot_bits<S>(bits, false);
      for (int r = 0; r < kTile; r += NR) {
        each_block<S>(pi, [&](int t, auto blocks) {
          constexpr int NB = decltype(blocks)::value;
          level_score_tile<S, width, NR, NB>(fmt, wide, query, r0 + r, t, scores + r * pi);
        });
      }
    });
    row_maxima<S>(scores, pi, tops);
    take_maxima<S, kTile>(fmt, state, r0, 1, tops, takes);
    weigh_levels<S>(scores, pi, tops, wide.v_scale, codes, weights);
    merge_levels<S, kTile>(state, r0, zero, takes, weights, merges);
    float* out = state.out + std::size_t(r0) * d;
    with_level_bits(fmt.v_bits, [&](auto bits) {
      constexpr int width = dot_bits<S>(bits, false);
      for (int r = 0; r < kTile; r += NR) {
        each_block<S, 1>(d, [&](int channel, auto blocks) {
          constexpr int NB = decltype(blocks)::value;
          level_value_tile<S, width, NR, NB>(fmt, wide, codes + r * pi, merges + r, channel, out + r * d);
        });
      }
    });
  }
}

}  // namespace hack
