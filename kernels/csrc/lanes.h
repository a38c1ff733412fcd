// Prefill: the rows of a query lie in the lanes of vectors, 16 to a vector. So maxima and sums of a row's scores go
// from vector to vector. Values of a token or a channel are broadcast from memory, which costs no arithmetic.
//
// A *tile* is the rows that share a pass over a page: NV vectors, as many as an instruction set has registers for. The
// data of the tile from row r0 on begin where the data of `r0` rows end. Their second dimension is the tile's vectors:
// values of D channels are [D, NV, 16].
#pragma once

#include "query.h"
#include "unrolled.h"

namespace hack {

constexpr int lane_rows(int rows) {
  return (rows + kLanes - 1) / kLanes * kLanes;
}

// use(r0, NV) for every tile from row `r0` on. What is left after tiles of NV vectors has half as many.
template <class S, int NV = S::kLaneVectors, class Use>
[[gnu::always_inline]] inline void each_lane_tile(int rows, Use use, int r0 = 0) {
  for (; r0 + (NV - 1) * kLanes < rows; r0 += NV * kLanes) use(r0, std::integral_constant<int, NV>{});
  if constexpr (NV > 1) each_lane_tile<S, NV / 2>(rows, use, r0);
}

// Running softmax as in `State`, except that `top` may lie below a row's largest score, by kHeadroom at most. So
// weights and outputs are rarely scaled down.
struct LaneState {
  float* top;     // [R]
  float* weight;  // [R]
  float* out;     // tiles [D, NV, 16]
};

inline constexpr float kHeadroom = 8;  // a factor of 256

template <class S>
LaneState make_lane_state(const PageFormat& fmt, int rows, Arena<S>& arena) {
  const std::size_t padded = lane_rows(rows);
  const LaneState state{arena.template take<float>(padded), arena.template take<float>(padded),
                        arena.template take<float>(padded * fmt.head_dim)};
  for (std::size_t r = 0; r < padded; ++r) {
    state.top[r] = kUnseen;
    state.weight[r] = 0.0f;
  }
  std::memset(state.out, 0, sizeof(float) * padded * fmt.head_dim);
  return state;
}

// Lifts `top` of the tile's rows to `found` where `found` is more than kHeadroom above. A row depends on no other row.
template <class S, int NV>
void lift_tops(const PageFormat& fmt, const LaneState& state, int r0, const typename S::F (&found)[NV]) {
  float above = 0;
  unrolled<NV>([&](auto v) {
    const float most = S::reduce_max(S::sub(found[v], S::load(state.top + r0 + v * kLanes)));
    above = most > above ? most : above;
  });
  if (above <= kHeadroom) return;
  alignas(64) float tops[NV * kLanes], keep[NV * kLanes];
  unrolled<NV>([&](auto v) { S::store(tops + v * kLanes, found[v]); });
  for (int r = 0; r < NV * kLanes; ++r) {
    float& top = state.top[r0 + r];
    const bool lifts = tops[r] - top > kHeadroom;
    keep[r] = lifts ? top - tops[r] : 0.0f;
    top = lifts ? tops[r] : top;
  }
  float* out = state.out + std::size_t(r0) * fmt.head_dim;
  unrolled<NV>([&](auto v) __attribute__((always_inline)) {
    const auto kept = exp2<S>(S::load(keep + v * kLanes));
    float* weight = state.weight + r0 + v * kLanes;
    S::store(weight, S::mul(kept, S::load(weight)));
    for (int d = 0; d < fmt.head_dim; ++d) {
      float* at = out + (d * NV + v) * kLanes;
      S::store(at, S::mul(kept, S::load(at)));
    }
  });
}

// Rows r0 .. r0 + 15 of `words` words each, `stride` bytes apart, to [words, NV, 16], the first of NV vectors; `words`
// is rounded up to a multiple of 16, and rows from `rows` on are 0.
template <class S>
void rows_to_lanes(const std::byte* in, std::int64_t stride, int rows, int words, int vectors, std::byte* out) {
  for (int w = 0; w < words; w += kLanes) {
    typename S::F block[kLanes];
    unrolled<kLanes>([&](auto r) {
      block[r] = r < rows ? S::load(reinterpret_cast<const float*>(in + r * stride) + w) : S::zero();
    });
    S::transpose(block);
    unrolled<kLanes>([&](auto i) {
      S::store(reinterpret_cast<float*>(out) + std::size_t(w + i) * vectors * kLanes, block[i]);
    });
  }
}

// Rows [rows] of `words` words each to tiles [words, NV, 16]; a tile takes `depth` words a row. Every row of `in` must
// be readable up to a multiple of 16 words; the words past its end are copied as well.
template <class S>
void to_lanes(const std::byte* in, std::int64_t stride, int rows, int words, int depth, std::byte* out) {
  each_lane_tile<S>(rows, [&](int r0, auto vectors) {
    for (int v = 0; v < vectors; ++v) {
      const int first = r0 + v * kLanes;
      rows_to_lanes<S>(in + first * stride, stride, rows - first, words, vectors,
                       out + 4 * (std::size_t(r0) * depth + v * kLanes));
    }
  });
}

// The item's output, or its partial state.
template <class S>
void write_lanes(const PageFormat& fmt, const AttendItem& item, const LaneState& state) {
  const int rows = item.tokens * item.group, d = fmt.head_dim;
  if (item.partial != nullptr) {
    std::memcpy(item.partial, state.top, sizeof(float) * rows);
    std::memcpy(item.partial + rows, state.weight, sizeof(float) * rows);
  }
  const auto store = [&](int r, int c, typename S::F values) __attribute__((always_inline)) {
    if (item.partial != nullptr) return S::store(item.partial + 2 * rows + std::size_t(r) * d + c, values);
    std::byte* row = item.out + (r / item.group) * item.out_stride + std::int64_t(r % item.group) * d * bytes_of(item.dtype);
    std::byte* at = row + c * bytes_of(item.dtype);
    if (item.dtype == Dtype::kFloat) return S::store(reinterpret_cast<float*>(at), values);
    auto* half = reinterpret_cast<std::uint16_t*>(at);
    return item.dtype == Dtype::kHalf ? S::store_half(half, values) : S::store_bfloat(half, values);
  };
  each_lane_tile<S>(rows, [&](int r0, auto vectors) {
    for (int v = 0; v < vectors; ++v) {
      const int first = r0 + v * kLanes;
      const auto weight = item.partial != nullptr ? S::splat(1.0f) : S::load(state.weight + first);
      for (int c = 0; c < d; c += kLanes) {
        typename S::F block[kLanes];
        unrolled<kLanes>([&](auto i) {
          block[i] = S::div(S::load(state.out + std::size_t(r0) * d + ((c + i) * vectors + v) * kLanes), weight);
        });
        S::transpose(block);
        unrolled<kLanes>([&](auto i) {
          if (first + i < rows) store(first + i, c, block[i]);
        });
      }
    }
  });
}

// Bytes of scratch for queries, state and scores of a tile.
[[gnu::always_inline]] constexpr std::size_t lane_scratch_bytes(const PageFormat& fmt, int rows) {
  const std::size_t padded = lane_rows(rows), d = fmt.head_dim;
  return padded * (4 * d + 8) + 64 * 16;
}

}  // namespace hack
