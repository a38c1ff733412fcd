#include "chooser.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "thread_pool.h"

namespace hack {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();
constexpr double kUnit = double(std::int64_t{1} << kWeightBits);
constexpr double kWeightless = 32;  // exp(-32) * 2^kWeightBits rounds to 0
constexpr std::int64_t kAloneIds = 1 << 15;
constexpr std::ptrdiff_t kSorted = 32;  // candidates that are sorted rather than narrowed further
constexpr int kBins = 256;

struct Candidate {
  double value;
  std::int64_t weight;
  std::int32_t id;
};

bool before(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// A row in FP64 and the values picked from it, in this thread's scratch memory, with room for whole blocks of n.
struct Row {
  double* values;
  double* tops;  // of each block
  double* ranked;
  double* picked;
  std::int64_t* weights;  // of the picked values
  std::int32_t* ids;      // of the picked values
  Candidate* candidates;
  int n;
  int blocks;
};

Row scratch_row(int n) {
  const int blocks = (n + kChoiceBlock - 1) / kChoiceBlock;
  const std::size_t padded = std::size_t(blocks) * kChoiceBlock, line = 64;
  const auto lines = [&](std::size_t bytes) { return (bytes + line - 1) / line * line; };
  const std::size_t row = lines(padded * 8), tops = lines(std::size_t(blocks) * 8), ids = lines(padded * 4);
  std::byte* at = thread_scratch(3 * row + 2 * tops + ids + lines(padded * sizeof(Candidate)));
  const auto take = [&](std::size_t bytes) { return std::exchange(at, at + bytes); };
  Row made{};
  made.values = reinterpret_cast<double*>(take(row));
  made.tops = reinterpret_cast<double*>(take(tops));
  made.ranked = reinterpret_cast<double*>(take(tops));
  made.picked = reinterpret_cast<double*>(take(row));
  made.weights = reinterpret_cast<std::int64_t*>(take(row));
  made.ids = reinterpret_cast<std::int32_t*>(take(ids));
  made.candidates = reinterpret_cast<Candidate*>(at);
  made.n = n;
  made.blocks = blocks;
  return made;
}

double peak_of(const Row& row) {
  return *std::max_element(row.tops, row.tops + row.blocks);
}

std::int64_t first_largest(const Row& row) {
  const double peak = peak_of(row);
  const auto block = std::find(row.tops, row.tops + row.blocks, peak) - row.tops;
  return std::find(row.values + block * kChoiceBlock, row.values + row.n, peak) - row.values;
}

// Barred ids become -inf, unless that leaves no id.
void bar(const Row& row, const ChoiceRules& rules) {
  std::vector<std::pair<std::int64_t, double>> before;
  for (const std::int64_t id : rules.barred)
    if (id < row.n) before.emplace_back(id, std::exchange(row.values[id], kNone));
  if (std::any_of(row.values, row.values + row.n, [](double value) { return value > kNone; })) return;
  for (const auto& [id, value] : before) row.values[id] = value;
}

// Applies bias, barred ids and penalties, and renews the tops of the blocks that they change.
void adjust(const Row& row, const Chooser& chooser) {
  const ChoiceRules& rules = chooser.rules();
  const auto touched = [&](std::int64_t id) {
    const double* block = row.values + id / kChoiceBlock * kChoiceBlock;
    row.tops[id / kChoiceBlock] = *std::max_element(block, block + kChoiceBlock);
  };
  for (const auto& [id, bias] : rules.bias)
    if (id < row.n) row.values[id] += bias;
  if (chooser.bars()) bar(row, rules);
  for (const Seen& seen : chooser.seen()) {
    if (seen.id >= row.n) continue;
    double& value = row.values[seen.id];
    if (chooser.repeats()) value = value > 0 ? value / rules.repetition : value * rules.repetition;
    if (chooser.penalizes() && seen.times > 0) value -= rules.frequency * double(seen.times) + rules.presence;
    touched(seen.id);
  }
  for (const auto& [id, bias] : rules.bias)
    if (id < row.n) touched(id);
  if (chooser.bars())
    for (const std::int64_t id : rules.barred)
      if (id < row.n) touched(id);
}

// Picks all values of at least `least`; returns how many.
std::int64_t pick(const Row& row, double least) {
  std::int64_t count = 0;
  for (int block = 0; block < row.blocks; ++block) {
    if (!(row.tops[block] >= least)) continue;
    const int first = block * kChoiceBlock, last = std::min(first + kChoiceBlock, row.n);
    for (int id = first; id < last; ++id) {
      row.picked[count] = row.values[id];
      row.ids[count] = id;
      count += row.values[id] >= least;
    }
  }
  return count;
}

// Picks the first `size` ids in order, unsorted, without values below `floor`. Returns how many.
std::int64_t pick_first(const Row& row, std::int64_t size, double floor) {
  double least = floor;
  if (size < row.blocks) {  // at least `size` values reach the `size`-th largest top
    std::copy(row.tops, row.tops + row.blocks, row.ranked);
    std::nth_element(row.ranked, row.ranked + size - 1, row.ranked + row.blocks, std::greater<>());
    least = std::max(floor, row.ranked[size - 1]);
  }
  const std::int64_t count = pick(row, least);
  if (count <= size) return count;
  for (std::int64_t i = 0; i < count; ++i) row.candidates[i] = {row.picked[i], 0, row.ids[i]};
  std::nth_element(row.candidates, row.candidates + size, row.candidates + count, before);
  for (std::int64_t i = 0; i < size; ++i) {
    row.picked[i] = row.candidates[i].value;
    row.ids[i] = row.candidates[i].id;
  }
  return size;
}

// Fills `candidates` with the picked values (`count` in all) whose weight is above `least`. Returns how many.
std::int64_t heavier(const Row& row, std::int64_t count, std::int64_t least) {
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    row.candidates[found] = {row.picked[i], row.weights[i], row.ids[i]};
    found += row.weights[i] > least;
  }
  return found;
}

std::int64_t sum_of(const Candidate* first, const Candidate* last) {
  std::int64_t sum = 0;
  for (; first < last; ++first) sum += first->weight;
  return sum;
}

// Narrows [first, last), which has more than one value, to one bin of values. With bins in order, it is the bin where
// the weights, summed from `first` on, reach `target`. `target` loses the weights of the bins before.
void narrow_to_bin(Candidate*& first, Candidate*& last, std::int64_t& target, double most, double scale) {
  const auto bin = [&](const Candidate& c) { return std::min(int((most - c.value) * scale), kBins - 1); };
  std::int64_t sums[kBins] = {};
  for (const Candidate* c = first; c < last; ++c) sums[bin(*c)] += c->weight;
  int reached = 0;
  for (; sums[reached] < target; ++reached) target -= sums[reached];
  first = std::partition(first, last, [&](const Candidate& c) { return bin(c) < reached; });
  last = std::partition(first, last, [&](const Candidate& c) { return bin(c) == reached; });
}

// Narrows [first, last) as narrow_to_bin does, to one of its two halves.
void narrow_to_half(Candidate*& first, Candidate*& last, std::int64_t& target) {
  Candidate* middle = first + (last - first) / 2;
  std::nth_element(first, middle, last, before);
  const std::int64_t sum = sum_of(first, middle);
  if (sum >= target) {
    last = middle;
  } else {
    target -= sum;
    first = middle;
  }
}

// Brings the shortest prefix (in order) whose weights sum to at least `target` to the front, its last candidate last.
// `target` is 1 .. the sum of all weights. Returns the prefix's length.
std::int64_t prefix(Candidate* all, std::int64_t count, std::int64_t target) {
  Candidate *first = all, *last = all + count;
  while (last - first > kSorted) {
    const auto [least, most] = std::minmax_element(
        first, last, [](const Candidate& a, const Candidate& b) { return a.value < b.value; });
    const double scale = kBins / (most->value - least->value);
    if (std::isfinite(scale))
      narrow_to_bin(first, last, target, most->value, scale);
    else
      narrow_to_half(first, last, target);
  }
  std::sort(first, last, before);
  for (; first + 1 < last && first->weight < target; ++first) target -= first->weight;
  return first + 1 - all;
}

// The sum, 1 .. total, that the weights of a prefix must reach to equal `share` of `total` or, if `beyond`, to exceed
// it.
std::int64_t target_of(double share, std::int64_t total, bool beyond) {
  const double sum = share * double(total);
  return std::clamp<std::int64_t>(beyond ? std::int64_t(std::floor(sum)) + 1 : std::int64_t(std::ceil(sum)), 1, total);
}

std::int64_t draw(const RowOperations& operations, const Row& row, const Chooser& chooser) {
  const ChoiceRules& rules = chooser.rules();
  const double peak = peak_of(row), floor = peak - kWeightless * rules.temperature;
  const bool limited = rules.top_k > 0 && rules.top_k < row.n;
  std::int64_t count = limited ? pick_first(row, rules.top_k, floor) : pick(row, floor);
  operations.weigh(row.picked, count, peak, rules.temperature, row.weights);
  const auto least = std::int64_t(std::ceil(rules.min_p * kUnit));
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    row.weights[i] = row.weights[i] >= least ? row.weights[i] : 0;
    total += row.weights[i];
  }
  const double u = uniform(rules.seed, std::uint64_t(chooser.emitted()));
  const bool cut = rules.top_p < 1;
  std::int64_t target = cut ? target_of(rules.top_p, total, false) : target_of(u, total, true);
  // The prefix that reaches the target holds no candidate of weight up to `light`. Such a candidate and all that follow
  // it weigh at most light + 1 each (weights fall in order, except for a rounding error of 1 in exp). Their sum is
  // therefore less than total - target, so the candidates before them reach the target.
  const std::int64_t light = std::max<std::int64_t>((total - target) / count - 2, 0);
  Candidate* all = row.candidates;
  count = prefix(all, heavier(row, count, light), target);
  if (cut) {
    target = target_of(u, sum_of(all, all + count), true);
    count = prefix(all, count, target);
  }
  return all[count - 1].id;
}

std::int64_t choose_in_row(const RowOperations& operations, const std::byte* logits, int n, const Chooser& chooser,
                           const std::uint32_t* allowed) {
  const auto words = (n + kChoiceBlock - 1) / kChoiceBlock;
  if (allowed != nullptr && std::all_of(allowed, allowed + words, [](std::uint32_t word) { return word + 1 == 0; }))
    allowed = nullptr;
  const bool greedy = chooser.rules().temperature == 0;
  if (greedy && allowed == nullptr && !chooser.adjusts()) return operations.largest(logits, n);
  const Row row = scratch_row(n);
  if (!operations.spread(logits, n, allowed, row.values, row.tops)) return kNotFinite;
  adjust(row, chooser);
  if (peak_of(row) == kNone) return kNoneAllowed;
  return greedy ? first_largest(row) : draw(operations, row, chooser);
}

Scores score_row(const RowOperations& operations, const std::byte* logits, int n, std::int64_t id, std::int64_t top) {
  const Row row = scratch_row(n);
  if (!operations.spread(logits, n, nullptr, row.values, row.tops)) return {std::nan(""), {}};
  const double peak = peak_of(row);
  std::int64_t count = pick(row, peak - kWeightless);
  operations.weigh(row.picked, count, peak, 1, row.weights);
  const std::int64_t sum = std::accumulate(row.weights, row.weights + count, std::int64_t{0});
  const double total = peak + std::log(std::ldexp(double(sum), -kWeightBits));
  Scores found{row.values[id] - total, {}};
  if (top == 0) return found;
  count = pick_first(row, std::min<std::int64_t>(top, n), kNone);
  for (std::int64_t i = 0; i < count; ++i) row.candidates[i] = {row.picked[i], 0, row.ids[i]};
  std::sort(row.candidates, row.candidates + count, before);
  for (std::int64_t i = 0; i < count; ++i)
    found.best.emplace_back(row.candidates[i].id, row.candidates[i].value - total);
  return found;
}

void for_each_row(int threads, std::int64_t rows, int n, Task task) {
  parallel_for(rows * n > kAloneIds ? threads : 1, rows, task);
}

}  // namespace

Chooser::Chooser(ChoiceRules rules, const std::vector<std::int64_t>& prompt) : rules_(std::move(rules)) {
  if (repeats())
    for (const std::int64_t id : prompt) see(id, 0);
}

void Chooser::append(std::int64_t id) {
  ++emitted_;
  if (repeats() || penalizes()) see(id, 1);
}

void Chooser::see(std::int64_t id, std::int64_t times) {
  const auto [at, fresh] = places_.try_emplace(id, seen_.size());
  if (fresh) seen_.push_back({id, 0});
  seen_[at->second].times += times;
}

void choose(const RowOperations& operations, int threads, const Choices& choices, std::int64_t* ids) {
  const std::int64_t words = (choices.n + kChoiceBlock - 1) / kChoiceBlock;
  for_each_row(threads, choices.logits.count, choices.n, [&](std::int64_t row) {
    const std::uint32_t* allowed = choices.allowed == nullptr ? nullptr : choices.allowed + row * words;
    const std::byte* logits = choices.logits.data + row * choices.logits.stride;
    const bool faulty = choices.faulty != nullptr && choices.faulty[row];
    ids[row] = faulty ? kFaulty : choose_in_row(operations, logits, choices.n, *choices.choosers[row], allowed);
  });
}

std::vector<Scores> score(const RowOperations& operations, int threads, const Strips& logits, int n,
                          const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& tops) {
  std::vector<Scores> found(ids.size());
  for_each_row(threads, logits.count, n, [&](std::int64_t row) {
    found[row] = score_row(operations, logits.data + row * logits.stride, n, ids[row], tops[row]);
  });
  return found;
}

double uniform(std::uint64_t seed, std::uint64_t index) {
  using Wide = unsigned __int128;
  std::uint64_t c[4] = {index + 1, index + 1 == 0, 0, 0}, key[2] = {seed, 0};  // numpy counts before it draws
  for (int round = 0; round < 10; ++round) {
    const Wide a = Wide{0xD2E7470EE14C6C93} * c[0], b = Wide{0xCA5A826395121157} * c[2];
    const std::uint64_t next[4] = {std::uint64_t(b >> 64) ^ c[1] ^ key[0], std::uint64_t(b),
                                   std::uint64_t(a >> 64) ^ c[3] ^ key[1], std::uint64_t(a)};
    std::copy(next, next + 4, c);
    key[0] += 0x9E3779B97F4A7C15;
    key[1] += 0xBB67AE8584CAA73B;
  }
  return double(c[0] >> 11) * 0x1p-53;
}

}  // namespace hack
