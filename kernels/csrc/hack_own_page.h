// A query's own page, with K quantized immediately (K_CODES).
#pragma once

#include "own_page.h"
#include "quantize.h"
#include "tile.h"

namespace hack {

// Codes of the own page's K in the order of a wide page; rows past the last stay 0.
template <class S>
void widen_own_k(const HackFormat& fmt, const ExactRows& own, const RowPointers& rows, const WidePage& wide,
                 Arena<S> arena) {
  const int d = fmt.head_dim, groups = fmt.k_groups(), pi = fmt.page_tokens, blocks = pi / kLanes;
  const RowCodes codes = take_codes(fmt, fmt.k_meta(), arena);
  quantize_k<S>(fmt, own.place, rows.k, own.total, codes);
  std::memset(wide.k, 0, fmt.elements());
  std::memset(wide.k_min, 0, sizeof(float) * fmt.k_meta());
  std::memset(wide.k_scale, 0, sizeof(float) * fmt.k_meta());
  for (int t = 0; t < own.total; ++t) {
    for (int j = 0; j < d / kQuad; ++j) {
      std::uint8_t* to = wide.k + (std::size_t(j) * blocks + t / kLanes) * kVectorBytes + t % kLanes * kQuad;
      std::memcpy(to, codes.codes + t * d + kQuad * j, kQuad);
    }
    for (int g = 0; g < groups; ++g) {
      wide.k_min[g * pi + t] = codes.minimum[t * groups + g];
      wide.k_scale[g * pi + t] = codes.scale[t * groups + g];
    }
  }
  if (fmt.asymmetric) widen_k_sums<S>(fmt, wide);
}

template <class S>
void attend_own_codes(const HackFormat& fmt, const AttendItem& item, const HackQuery& query, const WidePage& wide,
                      State& state, Arena<S> arena) {
  const RowPointers rows = row_pointers<S>(fmt, item.own);
  widen_own_k<S>(fmt, item.own, rows, wide, arena);
  float* own_scores = arena.template take<float>(kTile * fmt.page_tokens);
  attend_own<S>(fmt, item, query, rows, state, own_scores,
                [&](int r0, int, float* scores) { wide_scores<S>(fmt, wide, query, r0, scores); });
}

}  // namespace hack
