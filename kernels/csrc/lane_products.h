// Products of a page's words with rows in lanes (lanes.h). A word is 4 bytes: a number in FP32, or four codes. Every
// instruction set has a *unit* that multiplies words of one kind.
#pragma once

#include "unrolled.h"

namespace hack {

struct NoUnit {};  // where products need nothing to be set up in a thread

// FP32.
template <class S>
struct FloatUnit {
  using Sum = typename S::F;
  static constexpr int kRun = 0;

  static Sum zero() { return S::zero(); }
  static Sum load(const void* at) { return S::load(static_cast<const float*>(at)); }
  static void store(void* at, Sum sum) { S::store(static_cast<float*>(at), sum); }
  static auto vector(const void* at) { return load(at); }
  static auto word(const std::uint32_t* at) { return S::splat(*reinterpret_cast<const float*>(at)); }
  static Sum add(Sum sum, Sum word, Sum vector) { return S::fma(word, vector, sum); }
};

// Codes of `bits` bits, unsigned, times signed bytes.
template <class S, int bits>
struct CodeUnit {
  using Sum = typename S::I;
  static constexpr int kRun = S::template kRunOfDots<bits>;

  static Sum zero() { return S::zero_int(); }
  static Sum load(const void* at) { return S::load_int(at); }
  static void store(void* at, Sum sum) { S::store_int(at, sum); }
  static auto vector(const void* at) { return S::load_int(at); }
  static auto word(const std::uint32_t* at) { return S::broadcast_quad(at); }
  static Sum add(Sum sum, Sum word, Sum vector) { return S::template run_dot<bits>(sum, word, vector); }
  static Sum total(Sum run) { return S::run_total(run); }
  static Sum more(Sum sum, Sum total) { return S::add_int(sum, total); }
};

// Words a(i, j) at `words` + i * rows + j * columns.
struct Words {
  const std::uint32_t* words;
  std::int64_t rows;
  std::int64_t columns;
};

// Adds Σ_j a(i, j) b(j) to NI sums for NV vectors of lanes; b is [count, NV, 16]. Steps are taken by kSteps, so that sums
// need not be moved from register to register at the end of each.
template <class Unit, int NI, int NV>
[[gnu::always_inline]] inline void add_lane_products(const Words& a, int first, int count, const std::uint32_t* b,
                                                     typename Unit::Sum (&sums)[NI][NV]) {
  constexpr int kSteps = 4;
  const std::uint32_t* at = a.words + first * a.rows;
  const auto step = [&](int j) __attribute__((always_inline)) {
    decltype(Unit::vector(b)) vectors[NV];
    unrolled<NV>([&](auto v) { vectors[v] = Unit::vector(b + (j * NV + v) * kLanes); });
    unrolled<NI>([&](auto i) __attribute__((always_inline)) {
      const auto word = Unit::word(at + i * a.rows + j * a.columns);
      unrolled<NV>([&](auto v) { sums[i][v] = Unit::add(sums[i][v], word, vectors[v]); });
    });
  };
  int j = 0;
  for (; j + kSteps <= count; j += kSteps, at += kSteps * a.columns, b += kSteps * NV * kLanes)
    unrolled<kSteps>([&](auto k) __attribute__((always_inline)) { step(k); });
  for (; j < count; ++j, at += a.columns, b += NV * kLanes) step(0);
}

// out [n, NV, 16] = Σ_j a(i, j) b(j), or += if `adds`; n is a multiple of NI.
template <class Unit, int NI, int NV, bool adds>
[[gnu::always_inline]] inline void lane_products(const Words& a, int n, int count, const void* b, void* out) {
  const auto* vectors = static_cast<const std::uint32_t*>(b);
  for (int first = 0; first < n; first += NI) {
    auto* to = static_cast<std::uint32_t*>(out) + std::size_t(first) * NV * kLanes;
    typename Unit::Sum sums[NI][NV];
    if constexpr (Unit::kRun == 0) {
      unrolled<NI * NV>([&](auto i) { sums[i / NV][i % NV] = adds ? Unit::load(to + i * kLanes) : Unit::zero(); });
      add_lane_products<Unit, NI, NV>(a, first, count, vectors, sums);
      unrolled<NI * NV>([&](auto i) { Unit::store(to + i * kLanes, sums[i / NV][i % NV]); });
    } else {
      static_assert(!adds);
      for (int j = 0; j < count; j += Unit::kRun) {
        const int run = count - j < Unit::kRun ? count - j : Unit::kRun;
        unrolled<NI * NV>([&](auto i) { sums[i / NV][i % NV] = Unit::zero(); });
        add_lane_products<Unit, NI, NV>({a.words + j * a.columns, a.rows, a.columns}, first, run,
                                        vectors + std::size_t(j) * NV * kLanes, sums);
        // Sums of earlier runs are in `out`: with those of this run they would not fit in registers.
        unrolled<NI * NV>([&](auto i) {
          const auto total = Unit::total(sums[i / NV][i % NV]);
          Unit::store(to + i * kLanes, j == 0 ? total : Unit::more(Unit::load(to + i * kLanes), total));
        });
      }
    }
  }
}

}  // namespace hack
