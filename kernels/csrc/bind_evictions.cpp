// Votes for rows that may be evicted, and the pages that decode reads.
#include <nanobind/nanobind.h>

#include <algorithm>

#include "arrays.h"
#include "bindings.h"
#include "rowwise_calls.h"

namespace hack {
namespace {
namespace bound {  // named like what they call

// Adds the votes of queries q [Hkv, n G, D], in units of log2, for keys [Hkv, T, D] to votes [parts, Hkv, T]. Rows of q
// are G to a row of the sequence, from row `first` on.
void count_votes(const Kernels& kernels, nb::handle q, nb::handle keys, std::int64_t first, int group,
                 nb::handle votes) {
  const Array queries(q, "q"), seen(keys, "keys"), counts(votes, "votes");
  const std::size_t heads = queries.shape(0), rows = queries.shape(1), d = queries.shape(2);
  const std::size_t total = seen.shape(1), parts = counts.shape(0);
  expect_shape(seen, {heads, total, d});
  expect_shape(counts, {parts, heads, total});
  if (group < 1 || rows % std::size_t(group) || first < 0) refuse("rows of q are no multiple of group, or first is negative");
  if (std::size_t(first) + rows / std::size_t(group) > total) refuse("q has rows past the last key");
  const VoteCall call{elements<const float>(queries, Type::kFloat, heads * rows * d),
                      elements<const float>(seen, Type::kFloat, heads * total * d),
                      elements<std::int64_t>(counts, Type::kLong, parts * heads * total),
                      std::int64_t(parts),
                      std::int64_t(heads),
                      std::int64_t(rows),
                      std::int64_t(total),
                      first,
                      group,
                      int(d)};
  perform([=, &kernels] { hack::count_votes(kernels.engine().operations, kernels.threads(), call); });
}

// The pages that queries q [B, Hq, D] read of the first `sealed` [B] of tables [B, P], by bounds [N, Hkv, D], to out [B,
// Hkv, P]: `counts` [B] pages first.
void select_pages(const Kernels& kernels, nb::handle q, nb::handle least, nb::handle most, nb::handle tables,
                  nb::handle sealed, nb::handle counts, float alpha, bool halve, nb::handle out) {
  const Array queries(q, "q"), pages(tables, "tables"), selected(out, "out");
  const StridedArray low(least, "least"), high(most, "most");
  const std::size_t batch = queries.shape(0), width = pages.shape(1), d = queries.shape(2), heads = selected.shape(1);
  expect_shape(pages, {batch, width});
  expect_shape(selected, {batch, heads, width});
  for (const StridedArray* each : {&low, &high})
    if (each->type() != Type::kHalf || std::size_t(each->inner()) != d || std::size_t(each->elements()) != heads * d ||
        each->strips().count != low.strips().count)
      refuse(each->name(), "must be float16 [N, Hkv, D]");
  if (d % kLanes || heads == 0 || queries.shape(1) % heads) refuse("q needs D by 16 and a multiple of Hkv heads");
  const auto *entries = integers(pages, batch * width), *ends = integers(Array(sealed, "sealed"), batch),
             *first = integers(Array(counts, "counts"), batch);
  for (std::size_t b = 0; b < batch; ++b) {
    if (ends[b] < 0 || std::size_t(ends[b]) > width) refuse("sealed", "has more pages than tables");
    if (first[b] < std::min<std::int64_t>(2, ends[b]) || first[b] > ends[b]) refuse("counts", "must be 2 to sealed");
    for (std::int64_t i = 0; i < ends[b]; ++i)
      if (const auto page = entries[b * width + std::size_t(i)]; page < 0 || page >= low.strips().count)
        refuse("tables", "has a page outside the pool");
  }
  const SelectCall call{elements<const float>(queries, Type::kFloat, queries.size()),
                        low.strips(),
                        high.strips(),
                        entries,
                        ends,
                        first,
                        elements<std::int64_t>(selected, Type::kLong, selected.size()),
                        std::int64_t(batch),
                        std::int64_t(heads),
                        std::int64_t(width),
                        int(queries.shape(1) / heads),
                        int(d),
                        alpha,
                        halve};
  perform([=, &kernels] { hack::select_pages(kernels.engine().operations, kernels.threads(), call); });
}

}  // namespace bound
}  // namespace

void bind_evictions(nb::class_<Kernels>& kernels) {
  kernels.def("count_votes", bound::count_votes).def("select_pages", bound::select_pages);
}

}  // namespace hack
