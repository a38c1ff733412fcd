// Prefill: many rows against a page. Codes are unpacked once into bytes; Q·K^T and P·V are integer matrix products with
// register tiling. Both forms of Q and P and the codes of the open page are served here.
#pragma once

#include "layout.h"
#include "packed.h"
#include "softmax.h"

namespace hack {

// One page of one KV head, a byte per code: k [D/4][Π/16][16 tokens][4 channels], v [Π/4][D/16][16 channels][4 tokens].
struct WidePage {
  std::uint8_t* k;
  std::uint8_t* v;
  float* k_min;  // [G, Π]
  float* k_scale;
  float* k_sums;  // asymmetric form only
  float* v_min;   // [D]
  float* v_scale;
  float* v_sums;
};

template <class S>
WidePage make_wide_page(const HackFormat& fmt, Arena<S>& arena) {
  const auto floats = [&](std::size_t n) { return arena.template take<float>(n); };
  auto* k = arena.template take<std::uint8_t>(fmt.elements());
  auto* v = arena.template take<std::uint8_t>(fmt.elements());
  const std::size_t k_meta = fmt.k_meta(), d = fmt.v_meta();
  return {k, v, floats(k_meta), floats(k_meta), floats(k_meta), floats(d), floats(d), floats(d)};
}

// Codes [lanes, elements] in [blocks][chunks] packed vectors -> [elements / 4][blocks] vectors of bytes.
template <class S, int bits>
void widen_codes(const std::uint8_t* packed, int lanes, int elements, std::uint8_t* wide) {
  const int blocks = lanes / kLanes, chunks = elements / chunk_of(bits);
  for (int b = 0; b < blocks; ++b) {
    for (int c = 0; c < chunks; ++c, packed += kVectorBytes) {
      const auto codes = S::load_int(packed);
      unrolled<planes_of(bits)>([&](auto f) {
        auto* to = wide + ((c * planes_of(bits) + f) * blocks + b) * kVectorBytes;
        S::store_int(to, S::template plane<bits, f>(codes));
      });
    }
  }
}

template <class S>
void widen_halves(const std::uint16_t* in, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; i += kLanes) S::store(out + i, S::load_half(in + i));
}

// Σ of the codes in every lane, over `quads` vectors that are `blocks` vectors apart.
template <class S>
void sum_lanes(const std::uint8_t* wide, int blocks, int quads, float* sums) {
  for (int b = 0; b < blocks; ++b) {
    auto total = S::zero_int();
    for (int j = 0; j < quads; ++j) {
      total = S::dot(total, S::load_int(wide + (j * blocks + b) * kVectorBytes), S::splat_int(0x01010101));
    }
    S::store(sums + b * kLanes, S::to_float(total));
  }
}

template <class S>
void widen_k_sums(const HackFormat& fmt, const WidePage& wide) {
  const int blocks = fmt.page_tokens / kLanes, quads = fmt.k_partition / kQuad;
  for (int g = 0; g < fmt.k_groups(); ++g) {
    sum_lanes<S>(wide.k + std::size_t(g) * quads * blocks * kVectorBytes, blocks, quads,
                 wide.k_sums + g * fmt.page_tokens);
  }
}

template <class S>
void widen_page(const HackFormat& fmt, const ConstHackPage& page, const WidePage& wide) {
  with_width<S>(fmt.k_bits, [&](auto width) { width.widen(page.k_codes, fmt.page_tokens, fmt.head_dim, wide.k); });
  with_width<S>(fmt.v_bits, [&](auto width) { width.widen(page.v_codes, fmt.head_dim, fmt.page_tokens, wide.v); });
  widen_halves<S>(page.k_min, fmt.k_meta(), wide.k_min);
  widen_halves<S>(page.k_scale, fmt.k_meta(), wide.k_scale);
  widen_halves<S>(page.v_min, fmt.v_meta(), wide.v_min);
  widen_halves<S>(page.v_scale, fmt.v_meta(), wide.v_scale);
  if (!fmt.asymmetric) return;
  if (fmt.stored_sums) {
    for (int i = 0; i < int(fmt.k_meta()); ++i) wide.k_sums[i] = float(load_sum<S>(page.k_sums, fmt.k_sum_bytes(), i));
    for (int i = 0; i < int(fmt.v_meta()); ++i) wide.v_sums[i] = float(load_sum<S>(page.v_sums, fmt.v_sum_bytes(), i));
  } else {
    widen_k_sums<S>(fmt, wide);
    sum_lanes<S>(wide.v, fmt.head_dim / kLanes, fmt.page_tokens / kQuad, wide.v_sums);
  }
}

// The width that selects the product instruction: widths with the same product share compiled code.
template <class S>
constexpr int dot_bits(int bits, bool unsigned_rows) {
  return bits <= kNarrow || (S::kDotTakesBytes && !unsigned_rows) ? kNarrow : 8;
}

// dots[r][b] = Σ over quads of NR rows of bytes (`stride` apart) with NB vectors of codes; asymmetric P is unsigned.
template <class S, int bits, int NR, int NB, bool unsigned_rows>
[[gnu::always_inline]] inline void wide_dots(const std::uint8_t* codes, int blocks, int quads, const std::uint8_t* rows,
                                             int stride, typename S::I (&dots)[NR][NB]) {
  unrolled<NR * NB>([&](auto i) { dots[i / NB][i % NB] = S::zero_int(); });
  for (int j = 0; j < quads; ++j) {
    typename S::I vectors[NB];
    unrolled<NB>([&](auto b) { vectors[b] = S::load_int(codes + (std::size_t(j) * blocks + b) * kVectorBytes); });
    unrolled<NR>([&](auto r) __attribute__((always_inline)) {
      const auto quad = S::broadcast_quad(rows + r * stride + kQuad * j);
      unrolled<NB>([&](auto b) __attribute__((always_inline)) {
        dots[r][b] = unsigned_rows ? S::template dot_unsigned<bits>(dots[r][b], vectors[b], quad)
                                   : S::template dot<bits>(dots[r][b], vectors[b], quad);
      });
    });
  }
}

// Scores of NR rows from r0 with NB blocks of tokens from t0; `scores` is [kTile, Π] and starts at row r0.
template <class S, int bits, int NR, int NB>
void score_tile(const HackFormat& fmt, const WidePage& wide, const HackQuery& query, int r0, int t0, float* scores) {
  const int groups = fmt.k_groups(), pi = fmt.page_tokens, blocks = pi / kLanes, quads = fmt.k_partition / kQuad;
  typename S::F score[NR][NB];
  unrolled<NR * NB>([&](auto i) { score[i / NB][i % NB] = S::zero(); });
  for (int g = 0; g < groups; ++g) {
    typename S::I dots[NR][NB];
    const auto* codes = wide.k + (std::size_t(g) * quads * blocks + t0 / kLanes) * kVectorBytes;
    const auto* rows = reinterpret_cast<const std::uint8_t*>(query.codes + r0 * fmt.head_dim + g * fmt.k_partition);
    wide_dots<S, bits, NR, NB, false>(codes, blocks, quads, rows, fmt.head_dim, dots);
    unrolled<NB>([&](auto b) __attribute__((always_inline)) {
      const int at = g * pi + t0 + b * kLanes;
      const auto k_scale = S::load(wide.k_scale + at), k_min = S::load(wide.k_min + at);
      unrolled<NR>([&](auto r) __attribute__((always_inline)) {
        const int q = g * query.padded + r0 + r;
        score[r][b] =
            add_product<S>(score[r][b], S::to_float(dots[r][b]), k_scale, k_min, query.scale[q], query.sums[q]);
      });
    });
  }
  unrolled<NR * NB>([&](auto i) { S::store(scores + i / NB * pi + t0 + i % NB * kLanes, score[i / NB][i % NB]); });
}

// Adds the terms of Eq. (4) with Q's minimum to the scores of one row.
template <class S>
void add_minimum_terms(const HackFormat& fmt, const WidePage& wide, const HackQuery& query, int row, float* scores) {
  const int groups = fmt.k_groups(), pi = fmt.page_tokens;
  for (int g = 0; g < groups; ++g) {
    const auto minimum = S::splat(query.minimum[g * query.padded + row]), z = S::splat(float(fmt.k_partition));
    for (int t = 0; t < pi; t += kLanes) {
      const int at = g * pi + t;
      const auto low = S::mul(z, S::load(wide.k_min + at));
      const auto terms = S::fma(S::load(wide.k_scale + at), S::load(wide.k_sums + at), low);
      S::store(scores + t, S::fma(minimum, terms, S::load(scores + t)));
    }
  }
}

// Scores [kTile, Π] of rows r0..r0+3.
template <class S>
void wide_scores(const HackFormat& fmt, const WidePage& wide, const HackQuery& query, int r0, float* scores) {
  constexpr int NR = S::kTileRows;
  CodeWidths::with(fmt.k_bits, [&](auto bits) {
    for (int r = 0; r < kTile; r += NR) {
      each_block<S>(fmt.page_tokens, [&](int t, auto blocks) {
        score_tile<S, dot_bits<S>(bits, false), NR, blocks>(fmt, wide, query, r0 + r, t, scores + r * fmt.page_tokens);
      });
    }
  });
  if (!fmt.asymmetric) return;
  for (int r = 0; r < kTile; ++r) add_minimum_terms<S>(fmt, wide, query, r0 + r, scores + r * fmt.page_tokens);
}

template <class S, int bits, int NR, int NB, bool asymmetric>
void value_tile(const HackFormat& fmt, const WidePage& wide, const std::uint8_t* p, const RowMerge* merges, int d0,
                float* out) {
  const int blocks = fmt.head_dim / kLanes;
  typename S::I dots[NR][NB];
  wide_dots<S, bits, NR, NB, asymmetric>(wide.v + d0 / kLanes * kVectorBytes, blocks, fmt.page_tokens / kQuad, p,
                                         fmt.page_tokens, dots);
  unrolled<NB>([&](auto b) __attribute__((always_inline)) {
    const int channel = d0 + b * kLanes;
    const auto v_scale = S::load(wide.v_scale + channel), v_min = S::load(wide.v_min + channel);
    unrolled<NR>([&](auto r) __attribute__((always_inline)) {
      float* at = out + r * fmt.head_dim + channel;
      auto sum = S::load(at);
      if constexpr (asymmetric) {
        const auto low = S::mul(S::splat(float(fmt.page_tokens)), v_min);
        const auto terms = S::fma(v_scale, S::load(wide.v_sums + channel), low);
        sum = S::fma(S::splat(merges[r].take_low), terms, sum);
      }
      S::store(at, add_product<S>(sum, S::to_float(dots[r][b]), v_scale, v_min, merges[r].take, merges[r].sum));
    });
  });
}

template <class S, bool asymmetric>
void wide_values(const HackFormat& fmt, const WidePage& wide, const std::uint8_t* p, const RowMerge* merges,
                 float* out) {
  constexpr int NR = S::kTileRows;
  CodeWidths::with(fmt.v_bits, [&](auto bits) {
    for (int r = 0; r < kTile; r += NR) {
      each_block<S>(fmt.head_dim, [&](int d, auto blocks) {
        value_tile<S, dot_bits<S>(bits, asymmetric), NR, blocks, asymmetric>(fmt, wide, p + r * fmt.page_tokens,
                                                                             merges + r, d, out + r * fmt.head_dim);
      });
    }
  });
}

// Masks keys of the item's own page that come after a row's token, in the scores [kTile, Π] of rows r0...
template <class S>
void hide_later(const HackFormat& fmt, const AttendItem& item, int r0, float* scores) {
  for (int r = r0; r < r0 + kTile; ++r, scores += fmt.page_tokens) {
    const int token = r / item.group < item.tokens ? r / item.group : item.tokens - 1;
    for (int t = item.visible + token; t < fmt.page_tokens; ++t) scores[t] = kUnseen;
  }
}

// Attention of every row of the query to the page; `own` is the item whose own page this is, else null.
template <class S>
void attend_wide(const HackFormat& fmt, const WidePage& wide, const HackQuery& query, State& state, Arena<S> arena,
                 const AttendItem* own = nullptr) {
  const int pi = fmt.page_tokens;
  float* scores = arena.template take<float>(kTile * pi);
  auto* codes = arena.template take<std::uint8_t>(kTile * pi);
  alignas(64) float tops[kTile], takes[kLanes];
  PageWeights weights[kTile];
  RowMerge merges[kTile];
  for (int r0 = 0; r0 < query.rows; r0 += kTile) {
    wide_scores<S>(fmt, wide, query, r0, scores);
    if (own != nullptr) hide_later<S>(fmt, *own, r0, scores);
    row_maxima<S>(scores, pi, tops);
    take_maxima<S, kTile>(fmt, state, r0, 1, tops, takes);
    const auto weigh = fmt.asymmetric ? weigh_asymmetric<S> : weigh_symmetric<S>;
    weigh(scores, pi, tops, codes, weights);
    merge_weights<S, kTile>(fmt, state, r0, takes, weights, merges);
    float* out = state.out + std::size_t(r0) * fmt.head_dim;
    if (fmt.asymmetric) {
      wide_values<S, true>(fmt, wide, codes, merges, out);
    } else {
      wide_values<S, false>(fmt, wide, codes, merges, out);
    }
  }
}

}  // namespace hack
