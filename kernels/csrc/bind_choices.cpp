// The next tokens of a batch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "bindings.h"
#include "chooser.h"

namespace hack {
namespace {
namespace bound {  // named like what they call

// `rules` is a ChoiceRules of choosing.py, which has checked it.
Chooser make_chooser(nb::handle rules, const std::vector<std::int64_t>& prompt) {
  const auto number = [&](const char* name) { return nb::cast<double>(rules.attr(name)); };
  ChoiceRules made{};
  made.seed = nb::cast<std::uint64_t>(rules.attr("seed"));
  made.temperature = number("temperature");
  made.top_p = number("top_p");
  made.top_k = nb::cast<std::int64_t>(rules.attr("top_k"));
  made.min_p = number("min_p");
  made.presence = number("presence");
  made.frequency = number("frequency");
  made.repetition = number("repetition");
  made.bias = nb::cast<decltype(made.bias)>(rules.attr("bias"));
  made.barred = nb::cast<decltype(made.barred)>(rules.attr("barred"));
  made.barred_until = nb::cast<std::int64_t>(rules.attr("barred_until"));
  for (const std::int64_t id : prompt)
    if (id < 0) refuse("prompt_ids has a negative id");
  return Chooser(std::move(made), prompt);
}

void append_token(Chooser& chooser, std::int64_t token_id) {
  if (token_id < 0) refuse("token_id is negative");
  chooser.append(token_id);
}

int ids_of(const RowArray& logits) {
  if (logits.elements() > kMostIds)
    refuse("logits have " + std::to_string(logits.elements()) + " columns; at most " + std::to_string(kMostIds) +
           " can be weighed");
  return int(logits.elements());
}

const bool* flags_of(nb::handle faulty, std::size_t batch) {
  return faulty.is_none() ? nullptr : elements<const bool>(Array(faulty, "faulty"), Type::kBool, batch);
}

const std::uint32_t* words_of(nb::handle allowed, const RowArray& logits) {
  if (allowed.is_none()) return nullptr;
  const Array words(allowed, "allowed");
  const std::size_t each = std::size_t(logits.elements() + kChoiceBlock - 1) / kChoiceBlock;
  expect_shape(words, {std::size_t(logits.strips().count), each});
  return elements<const std::uint32_t>(words, Type::kInt, words.size());
}

// The next id of each row of logits [B, n], with one chooser a row, or a negative number that says why there is none.
std::vector<std::int64_t> choose(const Kernels& kernels, nb::handle logits, const nb::sequence& choosers,
                                 nb::handle faulty, nb::handle allowed) {
  const RowArray rows(logits, "logits");
  const std::size_t batch = std::size_t(rows.strips().count);
  std::vector<const Chooser*> each;
  for (const nb::handle chooser : choosers) {
    const Chooser* made = nullptr;
    if (!nb::try_cast(chooser, made) || made == nullptr)
      refuse("choosers[" + std::to_string(each.size()) + "] was not made by these kernels");
    each.push_back(made);
  }
  if (each.size() != batch)
    refuse("choosers are " + std::to_string(each.size()) + "; logits have " + std::to_string(batch) + " rows");
  const Choices choices{rows.strips(), ids_of(rows), each.data(), flags_of(faulty, batch), words_of(allowed, rows)};
  std::vector<std::int64_t> ids(batch);
  {
    const nb::gil_scoped_release unlocked;
    hack::choose(kernels.rows_of(rows), kernels.threads(), choices, ids.data());
  }
  return ids;
}

// For each row of logits [B, n]: the log-probability of its id, and its most probable ids with their log-probabilities.
nb::list score(const Kernels& kernels, nb::handle logits, const std::vector<std::int64_t>& ids,
               const std::vector<std::int64_t>& tops) {
  const RowArray rows(logits, "logits");
  const int n = ids_of(rows);
  const std::size_t batch = std::size_t(rows.strips().count);
  if (ids.size() != batch || tops.size() != batch) refuse("ids and tops need one number for each row of logits");
  for (std::size_t row = 0; row < batch; ++row) {
    if (ids[row] < 0 || ids[row] >= n) refuse("ids[" + std::to_string(row) + "] lies outside the vocabulary");
    if (tops[row] < 0) refuse("tops[" + std::to_string(row) + "] is negative");
  }
  std::vector<Scores> found;
  {
    const nb::gil_scoped_release unlocked;
    found = hack::score(kernels.rows_of(rows), kernels.threads(), rows.strips(), n, ids, tops);
  }
  nb::list scores;
  for (const Scores& each : found) scores.append(nb::make_tuple(each.of_id, nb::cast(each.best)));
  return scores;
}

}  // namespace bound
}  // namespace

void bind_choices(nb::module_& m, nb::class_<Kernels>& kernels) {
  using namespace nb::literals;
  nb::class_<Chooser>(m, "Chooser").def("append", bound::append_token, "token_id"_a);
  m.def("chooser", bound::make_chooser, "rules"_a, "prompt_ids"_a);
  kernels.def("choose", bound::choose, "logits"_a, "choosers"_a, "faulty"_a.none(), "allowed"_a.none())
      .def("score", bound::score);
}

}  // namespace hack
