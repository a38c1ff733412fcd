// Q in 8 bits, for pages of codes.
#pragma once

#include "hack_format.h"
#include "query.h"

namespace hack {

// Up to this number of rows, unpacking a page costs more than reading its packed codes again for every four rows.
inline constexpr int kPackedRows = 12;

// `scale` and `minimum` carry the factor log2(e) of `exact`.
struct HackQuery : Query {
  std::int8_t* codes;  // [R, D]
  float* scale;        // [G, R]
  float* sums;         // [G, R] Σ codes
  float* minimum;      // [G, R], asymmetric form only
};

// One partition x [Z] of a scaled row; the definition is `quantize_query` in reference/eq4.py.
template <class S>
void quantize_partition(const HackFormat& fmt, const float* x, std::int8_t* codes, float* scale, float* sum,
                        float* low) {
  auto smallest = S::load(x), largest = smallest;
  for (int d = kLanes; d < fmt.k_partition; d += kLanes) {
    smallest = S::min(S::load(x + d), smallest);
    largest = S::max(S::load(x + d), largest);
  }
  const float lo = S::reduce_min(smallest), hi = S::reduce_max(largest);
  const float range = fmt.asymmetric ? (hi - lo) / kAsymmetricLevels : (hi > -lo ? hi : -lo) / kSymmetricLevels;
  const float step = range == 0.0f ? 1.0f : range;
  const float origin = fmt.asymmetric ? lo : 0.0f, offset = fmt.asymmetric ? 128.0f : 0.0f;
  const auto least = S::splat(fmt.asymmetric ? 0.0f : -127.0f), most = S::splat(fmt.asymmetric ? 255.0f : 127.0f);
  auto total = S::zero_int();
  for (int d = 0; d < fmt.k_partition; d += kLanes) {
    const auto steps = S::div(S::sub(S::load(x + d), S::splat(origin)), S::splat(step));
    const auto level = S::max(S::min(S::floor(S::add(steps, S::splat(0.5f))), most), least);
    const auto code = S::truncate(S::sub(level, S::splat(offset)));
    total = S::add_int(total, code);
    S::store_low_bytes(reinterpret_cast<std::uint8_t*>(codes + d), code);
  }
  *scale = step * kLog2e;
  *sum = float(S::reduce_add_int(total));
  if (fmt.asymmetric) *low = (lo + 128.0f * step) * kLog2e;
}

template <class S>
HackQuery make_hack_query(const HackFormat& fmt, const AttendItem& item, Arena<S>& arena) {
  const int padded = padded_rows(item.tokens * item.group), d = fmt.head_dim, groups = fmt.k_groups();
  auto* codes = arena.template take<std::int8_t>(padded * d);
  float* scale = arena.template take<float>(padded * groups);
  float* sums = arena.template take<float>(padded * groups);
  float* minimum = arena.template take<float>(padded * groups);
  const Query query = make_query<S>(fmt, item, arena, [&](int r, const float* row) {
    for (int g = 0; g < groups; ++g) {
      const int z = g * fmt.k_partition, at = g * padded + r;
      quantize_partition<S>(fmt, row + z, codes + r * d + z, scale + at, sums + at, minimum + at);
    }
  });
  return {query, codes, scale, sums, minimum};
}

}  // namespace hack
