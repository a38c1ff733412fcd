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

// Integer products [rows, lanes] of bytes with a page's wide codes, tile by tile or, if the matrix unit takes their
// shape, at once.
template <class S>
class LevelDots {
 public:
  using Matrix = typename S::Matrix;

  LevelDots(const std::uint8_t* codes, int blocks, int quads, const std::uint8_t* rows, std::int32_t* all)
      : codes_(codes), rows_(rows), all_(all), blocks_(blocks), quads_(quads) {
    if (Matrix::takes(quads)) Matrix::dots(rows, kQuad * quads, codes, blocks, quads, all);
  }

  // Those of NR rows from r0 with NB blocks from block `b0` on.
  template <int bits, int NR, int NB>
  [[gnu::always_inline]] void read(int r0, int b0, typename S::I (&dots)[NR][NB]) const {
    if (Matrix::takes(quads_)) {
      unrolled<NR * NB>([&](auto i) __attribute__((always_inline)) {
        dots[i / NB][i % NB] = S::load_int(all_ + ((r0 + i / NB) * blocks_ + b0 + i % NB) * kLanes);
      });
    } else {
      wide_dots<S, bits, NR, NB, false>(codes_ + b0 * kVectorBytes, blocks_, quads_, rows_ + r0 * kQuad * quads_,
                                        kQuad * quads_, dots);
    }
  }

 private:
  const std::uint8_t *codes_, *rows_;
  std::int32_t* all_;
  int blocks_, quads_;
};

// Scores of NR rows from r0 with NB blocks of tokens from t0.
template <class S, int bits, int NR, int NB>
void level_score_tile(const LevelFormat& fmt, const WideLevels& wide, const LevelQuery& query,
                      const LevelDots<S>& products, int r0, int t0, float* scores) {
  typename S::I dots[NR][NB];
  products.template read<bits>(r0, t0 / kLanes, dots);
  const float zero = zero_point(fmt.k_bits);
  unrolled<NB>([&](auto b) __attribute__((always_inline)) {
    const auto scale = S::load(wide.k_scale + t0 + b * kLanes);
    unrolled<NR>([&](auto i) __attribute__((always_inline)) {
      const int r = r0 + i;
      const auto exact = S::sub(S::to_float(dots[i][b]), S::splat(zero * query.sums[r]));
      const auto score = S::mul(S::mul(exact, scale), S::splat(query.scale[r]));
      S::store(scores + r * fmt.page_tokens + t0 + b * kLanes, score);
    });
  });
}

// P·V of NR rows from r0 with NB blocks of channels from d0, added to `out`.
template <class S, int bits, int NR, int NB>
void level_value_tile(const LevelFormat& fmt, const LevelDots<S>& products, const LevelMerge* merges, int r0, int d0,
                      float* out) {
  typename S::I dots[NR][NB];
  products.template read<bits>(r0, d0 / kLanes, dots);
  unrolled<NR * NB>([&](auto i) __attribute__((always_inline)) {
    constexpr int b = i % NB;
    const int r = r0 + i / NB;
    float* at = out + r * fmt.head_dim + d0 + b * kLanes;
    const auto exact = S::sub(S::to_float(dots[i / NB][b]), S::splat(merges[r].correction));
    S::store(at, S::fma(S::splat(merges[r].take), exact, S::load(at)));
  });
}

// Attention of every row of the query to the page.
template <class S>
void attend_wide_levels(const LevelFormat& fmt, const WideLevels& wide, const LevelQuery& query, State& state,
                        Arena<S> arena) {
  constexpr int NR = S::kTileRows;
  const int pi = fmt.page_tokens, d = fmt.head_dim;
  float* scores = arena.template take<float>(std::size_t(kLanes) * pi);
  auto* codes = arena.template take<std::uint8_t>(std::size_t(kLanes) * pi);
  auto* dots = arena.template take<std::int32_t>(std::size_t(kLanes) * (pi > d ? pi : d));
  [[maybe_unused]] const typename LevelDots<S>::Matrix matrix;
  const float zero = zero_point(fmt.v_bits);
  alignas(64) float tops[kLanes], takes[kLanes];
  LevelWeights weights[kLanes];
  LevelMerge merges[kLanes];
  for (int r0 = 0; r0 < query.padded; r0 += kLanes) {
    const int rows = query.padded - r0 < kLanes ? query.padded - r0 : kLanes;
    for (float& top : tops) top = kUnseen;
    const LevelQuery tile = query.from(r0, d);
    const LevelDots<S> of_keys(wide.k, pi / kLanes, d / kQuad, reinterpret_cast<const std::uint8_t*>(tile.codes), dots);
    with_level_bits(fmt.k_bits, [&](auto bits) {
      constexpr int width = dot_bits<S>(bits, false);
      for (int r = 0; r < rows; r += NR) {
        each_block<S>(pi, [&](int t, auto blocks) {
          constexpr int NB = decltype(blocks)::value;
          level_score_tile<S, width, NR, NB>(fmt, wide, tile, of_keys, r, t, scores);
        });
      }
    });
    for (int r = 0; r < rows; r += kTile) row_maxima<S>(scores + r * pi, pi, tops + r);
    take_tile_maxima<S>(fmt, state, r0, rows, tops, takes);
    for (int r = 0; r < rows; r += kTile) {
      weigh_levels<S>(scores + r * pi, pi, tops + r, wide.v_scale, codes + r * pi, weights + r);
      merge_levels<S, kTile>(state, r0 + r, zero, takes + r, weights + r, merges + r);
    }
    float* out = state.out + std::size_t(r0) * d;
    const LevelDots<S> of_values(wide.v, d / kLanes, pi / kQuad, codes, dots);
    with_level_bits(fmt.v_bits, [&](auto bits) {
      constexpr int width = dot_bits<S>(bits, false);
      for (int r = 0; r < rows; r += NR) {
        each_block<S, 1>(d, [&](int channel, auto blocks) {
          constexpr int NB = decltype(blocks)::value;
          level_value_tile<S, width, NR, NB>(fmt, of_values, merges, r, channel, out);
        });
      }
    });
  }
}

}  // namespace hack
