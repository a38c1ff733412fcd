// Pages that are seen exactly, on a matrix unit that multiplies pairs in BF16 (AMX-BF16). A number with too many bits
// for BF16 is cut into parts in BF16, and the parts' products are added up in FP32. FP16 takes two parts, FP32 three.
#pragma once

#include "bf16_columns.h"
#include "exact_lanes.h"
#include "simd/amx.h"

namespace hack {

// The number of parts of queries (q), of K and V (kv) and of weights (p). Queries in bfloat16 have one part. Their
// weights have two, which hold 16 bits: enough for outputs that are rounded to 8. With `rounded`, K, V and weights are
// rounded to one part, as in a model in bfloat16 without a codec.
struct PairParts {
  int q;
  int kv;
  int p;
};
constexpr PairParts pair_parts(Dtype dtype, bool rounded) {
  if (dtype == Dtype::kBfloat) return rounded ? PairParts{1, 1, 1} : PairParts{1, 2, 2};
  return dtype == Dtype::kHalf ? PairParts{2, 2, 3} : PairParts{3, 2, 3};
}

// Implements what `FloatLanes` does.
template <bool rounded>
class PairLanes {
 public:
  using Unit = Amx::WholeTiles;

  static constexpr std::size_t scratch_bytes(const PageFormat& fmt, int rows) {
    const std::size_t d = padded(fmt.head_dim), pi = padded(fmt.page_tokens), tile = Amx::kLaneVectors * kLanes;
    return kMost * 2 * ((2 * lane_rows(rows) + fmt.page_tokens) * d + (fmt.head_dim + tile) * pi) + 64 * 8;
  }

  PairLanes(const PageFormat& fmt, const AttendItem& item, const Query& query, Arena<Amx>& arena)
      : fmt_(fmt), parts_(pair_parts(item.dtype, rounded)), scale_(kLog2e / std::sqrt(float(fmt.head_dim))) {
    const std::size_t d = padded(fmt.head_dim), pi = padded(fmt.page_tokens), all = lane_rows(query.rows) * d;
    const auto take = [&](std::size_t count) { return arena.template take<std::uint16_t>(count); };
    q_ = take(parts_.q * all);
    k_ = take(parts_.kv * fmt.page_tokens * d);
    v_ = take(parts_.kv * fmt.head_dim * pi);
    p_ = take(parts_.p * Amx::kLaneVectors * kLanes * pi);
    std::uint16_t* rows = take(parts_.q * all);
    std::memset(rows, 0, 2 * parts_.q * all);
    float row[kMaxHeadDim];
    for (int r = 0; r < query.rows; ++r) {
      const std::byte* token = item.q + (r / item.group) * item.q_stride;
      load_row<Amx>(token + std::int64_t(r % item.group) * fmt.head_dim * bytes_of(item.dtype), item.dtype, fmt.head_dim, row);
      for (int c = 0; c < fmt.head_dim; c += kLanes) {
        cut(Amx::load(row + c), parts_.q, [&](int part, __m256i half) {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + part * d + r * parts_.q * d + c), half);
        });
      }
    }
    const int words = parts_.q * int(d) / 2;
    to_lanes<Amx>(reinterpret_cast<const std::byte*>(rows), 4 * words, query.rows, words, words,
                  reinterpret_cast<std::byte*>(q_));
    // Each part of a number is about 2^8 times smaller than the part before. `each_pair` leaves the smallest products
    // out.
    each_pair(parts_.kv, parts_.q, [&](int of_k, int of_q) {
      for (std::size_t c = 0; c < d; c += kBfloatColumns)
        score_steps_[scores_++] = {std::int64_t(2 * (of_k * d + c)), std::int64_t(kLanes * 2 * (of_q * d + c))};
    });
  }

  template <class K, class V>
  void open(int total, K k, V v) {
    const int d = fmt_.head_dim, stride = padded(d);
    total_ = (total + kLanes - 1) / kLanes * kLanes;
    const int columns = padded(total_), across = padded(fmt_.page_tokens);
    for (int t = 0; t < total_; ++t) {
      std::uint16_t* to = k_ + std::size_t(t) * parts_.kv * stride;
      if (stride != d || t >= total) std::memset(to, 0, 2 * parts_.kv * stride);
      for (int c = 0; c < d && t < total; c += kLanes) {
        cut(k(t, c), parts_.kv, [&](int part, __m256i half) {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + part * stride + c), half);
        });
      }
    }
    for (int t = 0; t < columns; t += kLanes) {
      for (int c = 0; c < d; c += kLanes) {
        Amx::F block[kLanes];
        unrolled<kLanes>([&](auto i) { block[i] = t + i < total ? v(t + i, c) : Amx::zero(); });
        Amx::transpose(block);
        unrolled<kLanes>([&](auto i) __attribute__((always_inline)) {
          cut(block[i], parts_.kv, [&](int part, __m256i half) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(v_ + (std::size_t(c + i) * parts_.kv + part) * across + t), half);
          });
        });
      }
    }
    values_ = 0;
    each_pair(parts_.kv, parts_.p, [&](int of_v, int of_p) {
      for (int t = 0; t < columns; t += kBfloatColumns)
        value_steps_[values_++] = {2 * (of_v * across + t), kLanes * 2 * (of_p * across + t)};
    });
  }
  int total() const { return total_; }
  float scale() const { return scale_; }

  template <int NV>
  void scores(int r0, float* out) const {
    const std::int64_t d = padded(fmt_.head_dim);
    Amx::lane_products<Amx::Product::kPairs, NV, false>(k_, 2 * parts_.kv * d, total_, score_steps_, scores_,
                                                        q_ + r0 * parts_.q * d, out);
  }

  template <int NV>
  void add_values(float* p, float* out) const {
    const int across = padded(fmt_.page_tokens);
    for (int t = 0; t < padded(total_); t += 2) {
      unrolled<NV>([&](auto v) __attribute__((always_inline)) {
        auto first = Amx::zero(), second = Amx::zero();
        if (t < total_) {
          first = Amx::load(p + (t * NV + v) * kLanes);
          second = Amx::load(p + ((t + 1) * NV + v) * kLanes);
        }
        for (int part = 0; part < parts_.p; ++part) {
          const __m512i low = top_half(first), high = top_half(second);
          const std::size_t at = (std::size_t(part * across + t) / 2 * NV + v) * kLanes;
          _mm512_storeu_si512(p_ + 2 * at, _mm512_or_si512(_mm512_srli_epi32(low, 16), high));
          first = Amx::sub(first, _mm512_castsi512_ps(low));
          second = Amx::sub(second, _mm512_castsi512_ps(high));
        }
      });
    }
    Amx::lane_products<Amx::Product::kPairs, NV, true>(v_, 2 * parts_.kv * std::int64_t(across), fmt_.head_dim, value_steps_,
                                                       values_, p_, out);
  }

 private:
  static constexpr int kMost = 3;  // parts
  static constexpr int padded(int n) { return (n + kBfloatColumns - 1) / kBfloatColumns * kBfloatColumns; }

  // The nearest BF16 in the upper half of every lane.
  static __m512i top_half(Amx::F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
    return _mm512_and_si512(nearest, _mm512_set1_epi32(std::int32_t(0xFFFF0000)));
  }

  // Calls take(part, BF16) for each part of x. The remainder after the last part is lost.
  template <class Take>
  [[gnu::always_inline]] static void cut(Amx::F x, int parts, Take take) {
    for (int part = 0; part < parts; ++part) {
      const __m512i top = top_half(x);
      take(part, _mm512_cvtepi32_epi16(_mm512_srli_epi32(top, 16)));
      x = Amx::sub(x, _mm512_castsi512_ps(top));
    }
  }

  // Calls use(i, j) for parts i and j whose product counts. The smallest products are left out.
  template <class Use>
  static void each_pair(int first, int second, Use use) {
    const int most = first > second ? first : second;
    for (int i = 0; i < first; ++i)
      for (int j = 0; j < second; ++j)
        if (i + j < most) use(i, j);
  }

  static constexpr int kMostSteps = kMost * 2 * kMaxHeadDim / kBfloatColumns;

  const PageFormat& fmt_;
  PairParts parts_;
  float scale_;
  std::uint16_t* q_;  // tiles [parts, D / 2, NV, 16, 2]
  std::uint16_t* k_;  // [total, parts, D]
  std::uint16_t* v_;  // [D, parts, Π]
  std::uint16_t* p_;  // [parts, Π / 2, NV, 16, 2]
  int total_ = 0, scores_ = 0, values_ = 0;
  Amx::Step score_steps_[kMostSteps], value_steps_[kMostSteps];
};

}  // namespace hack
