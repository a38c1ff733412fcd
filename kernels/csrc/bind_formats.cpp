// Makers of page formats: each kind has a function, and its line in `bind_formats`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "arrays.h"
#include "bindings.h"
#include "delta_format.h"
#include "float_format.h"
#include "group_format.h"
#include "hack_format.h"
#include "huffman_format.h"
#include "level_format.h"
#include "nuq_format.h"
#include "row_format.h"
#include "work.h"

namespace hack {
namespace {

HackFormat make_hack_format(int head_dim, int page_tokens, int k_bits, int v_bits, int k_partition, bool stochastic,
                            bool asymmetric, bool stored_sums, bool own_k_codes, bool own_v_codes, std::uint64_t seed) {
  if (!CodeWidths::has(k_bits) || !CodeWidths::has(v_bits)) refuse("codes have a width that no kernel takes");
  return HackFormat({head_dim, page_tokens, k_bits, v_bits, k_partition, stochastic, asymmetric, stored_sums,
                     own_k_codes, own_v_codes, seed});
}

// `gains` [heads, D/8, D, 8] and `pair_gains` [heads, D/8, D/2, 8], in the order of level_format.h, and `weights`
// [heads, D] outlive the format. Either all are None or none is.
LevelFormat make_level_format(int head_dim, int page_tokens, int k_bits, int v_bits, bool narrow_scales, int sink,
                              int recent, nb::handle gains, nb::handle pair_gains, nb::handle weights) {
  if (!LevelWidths::has(k_bits) || !LevelWidths::has(v_bits)) refuse("levels have a width that no kernel takes");
  const Window window = make_window(sink, recent);
  if (gains.is_none()) return LevelFormat(head_dim, page_tokens, k_bits, v_bits, narrow_scales, window, {}, 0);
  const Array each_gain(gains, "gains"), each_pair(pair_gains, "pair_gains"), each_weight(weights, "weights");
  const std::size_t d = std::size_t(head_dim), heads = each_gain.shape(0);
  expect_shape(each_gain, {heads, d / kGainBlock, d, kGainBlock});
  expect_shape(each_pair, {heads, d / kGainBlock, d / 2, kGainBlock});
  expect_shape(each_weight, {heads, d});
  const Feedback feedback{elements<const float>(each_gain, Type::kFloat, heads * d * d),
                          elements<const std::int32_t>(each_pair, Type::kInt, heads * d * d / 2),
                          elements<const float>(each_weight, Type::kFloat, heads * d)};
  return LevelFormat(head_dim, page_tokens, k_bits, v_bits, narrow_scales, window, feedback, std::int64_t(heads));
}

// Refuses shapes that kernels which read pages value by value do not take.
void check_read_shape(int head_dim, int page_tokens) {
  if (head_dim < 1 || head_dim > kMaxHeadDim || head_dim % 32) refuse("head_dim is not a multiple of 32 up to 256");
  if (page_tokens < 1 || page_tokens > kMaxPageTokens || page_tokens % 32)
    refuse("page_tokens is not a multiple of 32 up to 128");
}

// `scaling` is a number of Scaling; `block` channels share a scale.
FloatFormat make_float_format(int head_dim, int page_tokens, int exponent_bits, int mantissa_bits, float largest,
                              int scaling, int block) {
  check_read_shape(head_dim, page_tokens);
  const SmallFloat element{exponent_bits, mantissa_bits, largest};
  const auto digit = [](int bits) { return bits >= 0 && bits < 16; };
  if (!digit(exponent_bits) || !digit(mantissa_bits) || !FloatShapes::has(element.shape()))
    refuse("elements have bits of exponent and mantissa that no kernel takes");
  if (scaling < 0 || scaling > int(Scaling::kTwofold)) refuse("scaling is unknown");
  if (scaling != int(Scaling::kPage) && block != 16 && block != 32) refuse("blocks have 16 or 32 channels");
  return FloatFormat(head_dim, page_tokens, element, Scaling(scaling), block);
}

// (bits, by_channel, group, centre), as Grouped has them.
using GroupWords = std::tuple<int, bool, int, int>;

Grouped make_grouped(const GroupWords& words, int head_dim, int page_tokens) {
  const auto [bits, by_channel, group, centre] = words;
  if (!(by_channel ? ChannelGroupWidths::has(bits) : TokenGroupWidths::has(bits)))
    refuse("groups have a width that no kernel takes");
  const int along = by_channel ? page_tokens : head_dim;
  const bool whole_row = !by_channel && group == head_dim;
  if (group < kLanes || along % group || (!whole_row && (group & (group - 1))))
    refuse("groups are a power of two, at least 16, that divides the page or the row");
  if (centre != 0 && (by_channel || !whole_row || 2 * centre >= 1 << bits)) refuse("centred codes have a scale a row");
  return {bits, by_channel, group, centre};
}

GroupFormat make_group_format(int head_dim, int page_tokens, const GroupWords& k, const GroupWords& v) {
  check_read_shape(head_dim, page_tokens);
  return GroupFormat(head_dim, page_tokens, make_grouped(k, head_dim, page_tokens),
                     make_grouped(v, head_dim, page_tokens));
}

NuqSide make_nuq_side(int bits, bool by_channel, bool ranged, const std::vector<float>& poles) {
  if (!NuqWidths::has(bits)) refuse("codes have a width that no kernel takes");
  if (poles.size() != std::size_t(1) << bits) refuse("poles are as many as codes");
  NuqSide side{bits, by_channel, ranged, {}};
  std::copy(poles.begin(), poles.end(), side.poles);
  return side;
}

// `k_range` [2, heads, D], `row_turns` [Π, D] and `frequencies` [D/2] outlive the format. All or none are None.
NuqFormat make_nuq_format(int head_dim, int page_tokens, int k_bits, int v_bits, const std::vector<float>& k_poles,
                          const std::vector<float>& v_poles, nb::handle k_range, nb::handle row_turns,
                          nb::handle frequencies) {
  check_read_shape(head_dim, page_tokens);
  const NuqSide k = make_nuq_side(k_bits, true, k_range.is_none(), k_poles);
  const NuqSide v = make_nuq_side(v_bits, false, true, v_poles);
  if (k_range.is_none()) return NuqFormat(head_dim, page_tokens, k, v, {}, 0);
  const Array range(k_range, "k_range"), turns(row_turns, "row_turns"), steps(frequencies, "frequencies");
  const std::size_t d = std::size_t(head_dim), pi = std::size_t(page_tokens), heads = range.size() / (2 * d);
  expect_shape(range, {2, heads, d});
  expect_shape(turns, {pi, d});
  expect_shape(steps, {d / 2});
  const NuqTables tables{elements<const float>(range, Type::kFloat, 2 * heads * d),
                         elements<const float>(turns, Type::kFloat, pi * d),
                         elements<const float>(steps, Type::kFloat, d / 2)};
  return NuqFormat(head_dim, page_tokens, k, v, tables, std::int64_t(heads));
}

// (unit, bits of room, rungs, codes [books, symbols], lookup [books, 2^12]), as HuffmanSide has them.
using HuffmanWords = std::tuple<int, std::int64_t, std::vector<float>, nb::object, nb::object>;

HuffmanSide make_huffman_side(const HuffmanWords& words) {
  const auto& [unit, room, rungs, codes, lookup] = words;
  if (unit < 0 || unit > int(Unit::kToken)) refuse("the unit is unknown");
  if (rungs.empty() || rungs.size() > kMostRungs) refuse("rungs are too many");
  const Array each_code(codes, "codes"), each_entry(lookup, "lookup");
  const std::size_t books = each_code.shape(0), symbols = each_code.shape(1);
  if (symbols < 2 || symbols > kMostSymbols) refuse("codes", "are of an alphabet that no kernel takes");
  expect_shape(each_entry, {books, std::size_t(1) << kLookupBits});
  HuffmanSide side{Unit(unit), int(symbols), int(books), room, int(rungs.size()), {},
                   elements<const std::int32_t>(each_code, Type::kInt, books * symbols),
                   integers(each_entry, books << kLookupBits)};
  std::copy(rungs.begin(), rungs.end(), side.rungs);
  return side;
}

// The tensors of `k` and `v` outlive the format.
HuffmanFormat make_huffman_format(int head_dim, int page_tokens, const HuffmanWords& k, const HuffmanWords& v) {
  check_read_shape(head_dim, page_tokens);
  const std::int64_t values = std::int64_t(head_dim) * page_tokens;
  for (const HuffmanWords* words : {&k, &v})
    if (std::get<1>(*words) < 2 * values || std::get<1>(*words) > 8 * values) refuse("room is 2 to 8 bits a code");
  return HuffmanFormat(head_dim, page_tokens, make_huffman_side(k), make_huffman_side(v));
}

// (bits, centre), as DeltaSide has them.
using DeltaWords = std::tuple<int, int>;

DeltaSide make_delta_side(const DeltaWords& words) {
  const auto [bits, centre] = words;
  if (!DeltaWidths::has(bits)) refuse("deltas have a width that no kernel takes");
  if (centre < 1 || 2 * centre >= 1 << bits) refuse("codes around the centre do not fit their bits");
  return {bits, centre};
}

DeltaFormat make_delta_format(int head_dim, int page_tokens, int group, const DeltaWords& k, const DeltaWords& v) {
  check_read_shape(head_dim, page_tokens);
  if (group < 2 || group > page_tokens) refuse("a group has at least 2 rows, and at most those of a page");
  return DeltaFormat(head_dim, page_tokens, make_delta_side(k), make_delta_side(v), group);
}

}  // namespace

void bind_formats(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<PageFormat>(m, "PageFormat");
  nb::class_<HackFormat, PageFormat>(m, "HackFormat");
  nb::class_<RowFormat, PageFormat>(m, "RowFormat");
  nb::class_<LevelFormat, PageFormat>(m, "LevelFormat");
  nb::class_<FloatFormat, PageFormat>(m, "FloatFormat");
  nb::class_<GroupFormat, PageFormat>(m, "GroupFormat");
  nb::class_<NuqFormat, PageFormat>(m, "NuqFormat");
  nb::class_<HuffmanFormat, PageFormat>(m, "HuffmanFormat");
  nb::class_<DeltaFormat, PageFormat>(m, "DeltaFormat");
  m.def("float_format", make_float_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "exponent_bits"_a,
        "mantissa_bits"_a, "largest"_a, "scaling"_a, "block"_a);
  m.def("group_format", make_group_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k"_a, "v"_a);
  m.def("nuq_format", make_nuq_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k_bits"_a, "v_bits"_a,
        "k_poles"_a, "v_poles"_a, "k_range"_a.none(), "row_turns"_a.none(), "frequencies"_a.none(),
        nb::keep_alive<0, 7>(), nb::keep_alive<0, 8>(), nb::keep_alive<0, 9>());
  m.def("huffman_format", make_huffman_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k"_a, "v"_a,
        nb::keep_alive<0, 3>(), nb::keep_alive<0, 4>());
  m.def("delta_format", make_delta_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "group"_a, "k"_a, "v"_a);
  m.def("level_format", make_level_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k_bits"_a, "v_bits"_a,
        "narrow_scales"_a, "sink"_a, "recent"_a, "gains"_a.none(), "pair_gains"_a.none(), "weights"_a.none(),
        nb::keep_alive<0, 8>(), nb::keep_alive<0, 9>(), nb::keep_alive<0, 10>());
  m.def("hack_format", make_hack_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k_bits"_a, "v_bits"_a,
        "k_partition"_a, "stochastic"_a, "asymmetric"_a, "stored_sums"_a, "own_k_codes"_a, "own_v_codes"_a, "seed"_a);
  m.def(
      "row_format", [](int head_dim, int page_tokens) { return RowFormat(head_dim, page_tokens); }, nb::kw_only(),
      "head_dim"_a, "page_tokens"_a);
}

}  // namespace hack
