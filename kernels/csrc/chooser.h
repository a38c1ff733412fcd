// The next token of every sequence of a batch; choosing.py has the definition.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "rowwise_calls.h"

namespace hack {

struct ChoiceRules {
  std::uint64_t seed;
  double temperature;
  double top_p;
  std::int64_t top_k;
  double min_p;
  double presence;
  double frequency;
  double repetition;
  std::vector<std::pair<std::int64_t, double>> bias;
  std::vector<std::int64_t> barred;
  std::int64_t barred_until;
};

// An id of the output, or of the prompt if there is a penalty for repetition.
struct Seen {
  std::int64_t id;
  std::int64_t times;  // in the output
};

// The rules of one sequence, and those facts about its tokens so far that the rules need.
class Chooser {
 public:
  Chooser(ChoiceRules rules, const std::vector<std::int64_t>& prompt);

  void append(std::int64_t id);

  const ChoiceRules& rules() const { return rules_; }
  std::int64_t emitted() const { return emitted_; }
  bool bars() const { return emitted_ < rules_.barred_until && !rules_.barred.empty(); }
  bool repeats() const { return rules_.repetition != 1; }
  bool penalizes() const { return rules_.frequency != 0 || rules_.presence != 0; }
  bool adjusts() const { return bars() || repeats() || penalizes() || !rules_.bias.empty(); }
  std::span<const Seen> seen() const { return seen_; }

 private:
  void see(std::int64_t id, std::int64_t times);

  ChoiceRules rules_;
  std::vector<Seen> seen_;
  std::unordered_map<std::int64_t, std::size_t> places_;  // id -> its index in seen_
  std::int64_t emitted_ = 0;
};

// Instead of an id.
inline constexpr std::int64_t kNotFinite = -1, kFaulty = -2, kNoneAllowed = -3;

// The largest vocabulary: sums of weights stay below 2^63.
inline constexpr std::int64_t kMostIds = std::int64_t{1} << 20;

// A batch of rows of logits [count, n].
struct Choices {
  Strips logits;
  int n;
  const Chooser* const* choosers;  // of each row
  const bool* faulty;              // of each row; null: none
  const std::uint32_t* allowed;    // words [count, ceil(n / 32)]; null: all
};

// One id for each row, or one of the values above. No chooser changes.
void choose(const RowOperations& operations, int threads, const Choices& choices, std::int64_t* ids);

// The log-probability of an id, and the most probable ids with theirs.
struct Scores {
  double of_id;
  std::vector<std::pair<std::int64_t, double>> best;
};

// For each row of logits [count, n]: the score of ids[row], and the tops[row] best ids. A row that has a NaN or an
// infinite largest logit gets the score NaN and no best ids.
std::vector<Scores> score(const RowOperations& operations, int threads, const Strips& logits, int n,
                          const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& tops);

// The number in [0, 1) for output token `index`: the first word of numpy's Philox with this key and counter.
double uniform(std::uint64_t seed, std::uint64_t index);

}  // namespace hack
