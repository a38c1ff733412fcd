// Votes of queries for the rows that they attend to (definition: voting.py).
#pragma once

#include "math.h"
#include "work.h"

namespace hack {

inline constexpr float kWholeVote = 1 << 30;
inline constexpr float kLeastScore = -126;  // below the largest: 2^x is then still a normal number, and no vote

// Adds the votes of one query to votes [seen]. Its scores [whole vectors], in units of log2, are overwritten. The total
// takes lanes in their order and every lane's numbers in theirs, so that votes depend on the scores alone.
template <class S>
void vote_row(float* scores, std::int64_t seen, std::int64_t* votes) {
  const std::int64_t end = (seen + kLanes - 1) / kLanes * kLanes;
  for (std::int64_t t = seen; t < end; ++t) scores[t] = -__builtin_inff();
  auto tops = S::load(scores);
  for (std::int64_t t = kLanes; t < end; t += kLanes) tops = S::max(tops, S::load(scores + t));
  const auto top = S::splat(S::reduce_max(tops)), least = S::splat(kLeastScore);
  auto totals = S::zero();
  for (std::int64_t t = 0; t < end; t += kLanes) {
    const auto weights = exp2<S>(S::max(S::sub(S::load(scores + t), top), least));
    S::store(scores + t, weights);
    totals = S::add(totals, weights);
  }
  alignas(64) float lanes[kLanes];
  S::store(lanes, totals);
  float total = 0;
  for (const float lane : lanes) total += lane;
  const auto share = S::splat(kWholeVote / total);
  alignas(64) std::int32_t counts[kLanes];
  for (std::int64_t t = 0; t < end; t += kLanes) {
    S::store_int(counts, S::nearest(S::mul(S::load(scores + t), share)));
    const int some = int(seen - t < kLanes ? seen - t : kLanes);
    for (int i = 0; i < some; ++i) votes[t + i] += counts[i];
  }
}

}  // namespace hack
