// The pages that each KV head reads, by the bounds of their keys (definition: page_selection.py).
#include <algorithm>
#include <limits>

#include "arena.h"
#include "rowwise_calls.h"
#include "thread_pool.h"

namespace hack {
namespace {

constexpr std::int64_t kLeastPairs = 2;  // that stay, so that the first and the last page do

// What one KV head of one sequence needs to choose among `number` pages.
struct Choice {
  float* q_most;
  float* q_least;
  float* scores;
  std::int64_t* order;
  bool* late;  // come after all others
  bool* chosen;

  Choice(std::byte* scratch, int head_dim, std::int64_t width) {
    Arena<void> arena(scratch);
    q_most = arena.take<float>(std::size_t(head_dim));
    q_least = arena.take<float>(std::size_t(head_dim));
    scores = arena.take<float>(std::size_t(width));
    order = arena.take<std::int64_t>(std::size_t(width));
    late = arena.take<bool>(std::size_t(width));
    chosen = arena.take<bool>(std::size_t(width));
  }
  static std::size_t bytes(int head_dim, std::int64_t width) {
    return 2 * sizeof(float) * std::size_t(head_dim) + (sizeof(float) + sizeof(std::int64_t) + 2) * std::size_t(width) +
           6 * 64;
  }

  // Chooses `count` of the first `number` pages or pairs: both ends, then by descending scores.
  void choose(std::int64_t number, std::int64_t count) const {
    scores[0] = scores[number - 1] = std::numeric_limits<float>::infinity();
    for (std::int64_t i = 0; i < number; ++i) order[i] = i;
    std::sort(order, order + number, [this](std::int64_t a, std::int64_t b) {
      if (late[a] != late[b]) return late[b];
      return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    });
    std::fill(chosen, chosen + number, false);
    for (std::int64_t i = 0; i < count; ++i) chosen[order[i]] = true;
  }
};

void select(const Operations& operations, const SelectCall& call, std::int64_t b, std::int64_t head) {
  const std::int64_t *pages = call.tables + b * call.width, number = call.sealed[b], count = call.counts[b];
  const std::int64_t d = call.head_dim;
  const Choice choice(thread_scratch(Choice::bytes(call.head_dim, call.width)), call.head_dim, call.width);
  const float* q = call.q + (b * call.heads + head) * call.group * d;
  for (std::int64_t i = 0; i < d; ++i) {
    float sum = 0;
    for (int g = 0; g < call.group; ++g) sum += q[g * d + i];
    choice.q_most[i] = call.alpha * sum;
    choice.q_least[i] = (1 - call.alpha) * sum;
  }
  const auto bounds = [&](const Strips& of, std::int64_t page) {
    return reinterpret_cast<const std::uint16_t*>(of.data + pages[page] * of.stride) + head * d;
  };
  const auto score = [&](std::int64_t first, std::int64_t last) {
    const KeyBounds both{{bounds(call.least, first), bounds(call.least, last)},
                         {bounds(call.most, first), bounds(call.most, last)}};
    return operations.score_bounds(choice.q_most, choice.q_least, both, call.head_dim);
  };
  std::fill(choice.late, choice.late + number, false);
  if (call.halve) {
    const std::int64_t pairs = (number + 1) / 2, better = std::max(kLeastPairs, (pairs + 1) / 2);
    for (std::int64_t i = 0; i < pairs; ++i) choice.scores[i] = score(2 * i, std::min(2 * i + 1, number - 1));
    choice.choose(pairs, std::min(better, pairs));
    for (std::int64_t i = 0; i < number; ++i) choice.late[i] = !choice.chosen[i / 2];
  }
  for (std::int64_t i = 0; i < number; ++i) choice.scores[i] = score(i, i);
  choice.choose(number, count);
  std::int64_t *out = call.out + (b * call.heads + head) * call.width, *rest = out + count;
  for (std::int64_t i = 0; i < call.width; ++i) *(i < number && choice.chosen[i] ? out : rest)++ = pages[i];
}

}  // namespace

void select_pages(const Operations& operations, int threads, const SelectCall& call) {
  parallel_for(threads, call.batch * call.heads, [&](std::int64_t i) {
    const std::int64_t b = i / call.heads, head = i % call.heads;
    if (call.sealed[b] > 0) return select(operations, call, b, head);
    std::copy_n(call.tables + b * call.width, call.width, call.out + i * call.width);
  });
}

}  // namespace hack
