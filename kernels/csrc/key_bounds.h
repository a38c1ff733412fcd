// Scores of pages by the bounds of their keys (definition: page_selection.py).
#pragma once

#include "work.h"

namespace hack {

// Σ_d most_d q_most,d + least_d q_least,d, where the q's have the factors α and 1 - α. Lanes are summed in their order,
// so that a score is the same on every instruction set.
template <class S>
float score_bounds(const float* q_most, const float* q_least, const KeyBounds& of, int d) {
  auto sums = S::zero();
  for (int i = 0; i < d; i += kLanes) {
    const auto most = S::max(S::load_half(of.most[0] + i), S::load_half(of.most[1] + i));
    const auto least = S::min(S::load_half(of.least[0] + i), S::load_half(of.least[1] + i));
    sums = S::fused(S::load(q_least + i), least, S::fused(S::load(q_most + i), most, sums));
  }
  alignas(64) float lanes[kLanes];
  S::store(lanes, sums);
  float total = 0;
  for (const float lane : lanes) total += lane;
  return total;
}

}  // namespace hack
