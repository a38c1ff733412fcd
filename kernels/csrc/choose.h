// Steps from a row of logits to the next token (definition: choosing.py): logits in FP64 with the largest of each
// block, and weights. Operations are elementwise IEEE or comparisons, so every instruction set gives the same bits.
#pragma once

#include <bit>
#include <limits>

#include "rowwise.h"

namespace hack {

// Writes the logits of a row to `values` [whole blocks] in FP64, and the largest of each block to `tops`. A logit is
// -inf past n and where `allowed` (a bit for each id; null: all) has 0. False if the row has NaN or its largest is
// infinite.
template <class S, Dtype dtype>
bool spread_row(const std::byte* row, int n, const std::uint32_t* allowed, double* values, double* tops) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  alignas(64) float x[kChoiceBlock], most[kChoiceBlock];
  alignas(64) std::int32_t numbers[kChoiceBlock];
  for (int l = 0; l < kChoiceBlock; ++l) {
    most[l] = none;
    numbers[l] = 1;
  }
  for (int at = 0, block = 0; at < n; at += kChoiceBlock, ++block) {
    for (int l = 0; l < kChoiceBlock && at + l < n; l += kLanes) S::store(x + l, load_lanes<S, dtype>(row, at + l, n));
    for (int l = n - at; l < kChoiceBlock; ++l) x[l] = none;
    for (int l = 0; l < kChoiceBlock; ++l) {
      numbers[l] &= x[l] == x[l];
      most[l] = x[l] > most[l] ? x[l] : most[l];
    }
    if (allowed != nullptr && allowed[block] != ~std::uint32_t{0})
      for (int l = 0; l < kChoiceBlock; ++l) x[l] = allowed[block] >> l & 1 ? x[l] : none;
    for (int l = 0; l < kChoiceBlock; ++l) values[at + l] = x[l];
    for (int half = kChoiceBlock / 2; half > 0; half /= 2)
      for (int l = 0; l < half; ++l) x[l] = x[l] > x[l + half] ? x[l] : x[l + half];
    tops[block] = x[0];
  }
  float top = none;
  bool number = true;
  for (int l = 0; l < kChoiceBlock; ++l) {
    top = most[l] > top ? most[l] : top;
    number &= numbers[l] != 0;
  }
  return number && top > none && top < -none;
}

constexpr int kSeriesTerms = 12;

// 1 / k! of the series of e^r, from the last term to the first.
struct Series {
  double terms[kSeriesTerms + 1];
};
constexpr Series series() {
  Series made{};
  double factorial = 1;
  for (int k = 0; k <= kSeriesTerms; ++k) {
    factorial *= k > 0 ? k : 1;
    made.terms[kSeriesTerms - k] = 1 / factorial;
  }
  return made;
}

// The integers nearest to 2^kWeightBits exp((value - peak) / temperature), for values of at most `peak`.
template <class S>
void weigh(const double* values, std::int64_t count, double peak, double temperature, std::int64_t* weights) {
  constexpr double log2_e = 1.4426950408889634, ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
  constexpr double lowest = -40, round = 0x1.8p52;  // adding `round` leaves an integer in the lower bits
  constexpr Series e = series();
  for (std::int64_t i = 0; i < count; ++i) {
    const double given = (values[i] - peak) / temperature, x = given > lowest ? given : lowest;
    const double shifted = x * log2_e + round, k = shifted - round;
    const double r = (x - k * ln2_high) - k * ln2_low;
    double y = e.terms[0];
    for (int term = 1; term <= kSeriesTerms; ++term) y = y * r + e.terms[term];
    const auto power = std::bit_cast<std::uint64_t>(shifted) + std::uint64_t(kWeightBits);
    const auto scaled = std::bit_cast<double>(std::bit_cast<std::uint64_t>(y) + (power << 52));
    weights[i] = std::bit_cast<std::int64_t>(scaled + round) - std::bit_cast<std::int64_t>(round);
  }
}

}  // namespace hack
