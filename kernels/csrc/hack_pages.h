// Kind::kHack: the engine's operations on pages of codes, on one instruction set S.
#pragma once

#include "hack_lanes.h"
#include "hack_own_page.h"
#include "packed.h"
#include "quantize.h"
#include "requantize.h"
#include "tile.h"

namespace hack {

// Operations on codes of a width that divides a byte. K lies by token and V by channel, so most have two forms.
template <class S, int bits>
struct Width {
  static_assert(8 % bits == 0);
  // One byte per code to native order and back.
  static constexpr auto pack_k = hack::pack_k<S, bits>;
  static constexpr auto pack_k_from = hack::pack_k_from<S, bits>;
  static constexpr auto unpack_k = hack::unpack_k<S, bits>;
  static constexpr auto pack_v = hack::pack_v<S, bits>;
  static constexpr auto unpack_v = hack::unpack_v<S, bits>;
  // Wire order to native order and back.
  static constexpr auto k_from_wire = hack::k_from_wire<S, bits>;
  static constexpr auto k_to_wire = hack::k_to_wire<S, bits>;
  static constexpr auto v_from_wire = hack::v_from_wire<S, bits>;
  static constexpr auto v_to_wire = hack::v_to_wire<S, bits>;
  static constexpr auto dequantize_v = hack::dequantize_v<S, bits>;
  // Attention of NR rows on packed codes; for many rows, codes to bytes.
  template <int NR>
  static constexpr auto scores = packed_scores<S, bits, NR>;
  template <int NR>
  static constexpr auto values = packed_values<S, bits, NR>;
  static constexpr auto widen = widen_codes<S, bits>;
};

// Codes [Π, D], a byte each, in native order.
template <class S>
void pack_codes(const HackFormat& fmt, const std::uint8_t* k, const std::uint8_t* v, const HackPage& page) {
  with_width<S>(fmt.k_bits, [&](auto width) { width.pack_k(fmt, k, page.k_codes); });
  with_width<S>(fmt.v_bits, [&](auto width) { width.pack_v(fmt, v, page.v_codes); });
}

template <class S>
void seal_codes(const PageFormat& format, Place place, const std::uint16_t* k, const std::uint16_t* v,
                const Planes& planes, std::byte* scratch) {
  const HackFormat& fmt = as_hack(format);
  const auto page = hack_page<HackPage>(planes);
  Arena<S> arena(scratch);
  const RowCodes k_codes = take_codes(fmt, fmt.k_meta(), arena), v_codes = take_codes(fmt, fmt.v_meta(), arena);
  RowPointers rows;
  for (int t = 0; t < fmt.page_tokens; ++t) {
    rows.k[t] = k + std::size_t(t) * fmt.head_dim;
    rows.v[t] = v + std::size_t(t) * fmt.head_dim;
  }
  quantize_page<S>(fmt, place, rows.k, rows.v, k_codes, v_codes);
  pack_codes<S>(fmt, k_codes.codes, v_codes.codes, page);
  float* turned = arena.template take<float>(fmt.k_meta() + kLanes);
  const auto store_k = [&](const float* meta, std::uint16_t* plane) {
    transpose<S>(meta, turned, fmt.page_tokens, fmt.k_groups());
    for (std::size_t i = 0; i < fmt.k_meta(); i += kLanes) S::store_half(plane + i, S::load(turned + i));
  };
  store_k(k_codes.minimum, page.k_min);
  store_k(k_codes.scale, page.k_scale);
  store_v_meta<S>(fmt, v_codes, page);
  if (!fmt.sums_at_rest()) return;
  count_k_sums<S>(fmt, 0, k_codes.codes, page);
  count_v_sums<S>(fmt, v_codes.codes, page);
}

template <class S>
void recount_sums(const HackFormat& fmt, const HackPage& page, std::byte* scratch) {
  Arena<S> arena(scratch);
  auto* k = arena.template take<std::uint8_t>(fmt.elements());
  auto* v = arena.template take<std::uint8_t>(fmt.elements());
  with_width<S>(fmt.k_bits, [&](auto width) { width.unpack_k(fmt, page.k_codes, k); });
  with_width<S>(fmt.v_bits, [&](auto width) { width.unpack_v(fmt, page.v_codes, v); });
  count_k_sums<S>(fmt, 0, k, page);
  count_v_sums<S>(fmt, v, page);
}

template <class S>
void install_codes(const PageFormat& format, const ConstPlanes& from, const Planes& to, std::byte* scratch) {
  const HackFormat& fmt = as_hack(format);
  const auto wire = hack_page<ConstHackPage>(from);
  const auto page = hack_page<HackPage>(to);
  with_width<S>(fmt.k_bits, [&](auto width) { width.k_from_wire(fmt, wire.k_codes, page.k_codes); });
  with_width<S>(fmt.v_bits, [&](auto width) { width.v_from_wire(fmt, wire.v_codes, page.v_codes); });
  transpose<S>(wire.k_min, page.k_min, fmt.page_tokens, fmt.k_groups());
  transpose<S>(wire.k_scale, page.k_scale, fmt.page_tokens, fmt.k_groups());
  std::memcpy(page.v_min, wire.v_min, 2 * fmt.v_meta());
  std::memcpy(page.v_scale, wire.v_scale, 2 * fmt.v_meta());
  if (!fmt.sums_at_rest()) return;
  if (wire.k_sums == nullptr || wire.v_sums == nullptr) {
    recount_sums<S>(fmt, page, scratch);
    return;
  }
  for (int t = 0; t < fmt.page_tokens; ++t) {
    for (int g = 0; g < fmt.k_groups(); ++g) {
      const int sum = load_sum<S>(wire.k_sums, fmt.k_sum_bytes(), t * fmt.k_groups() + g);
      store_sum<S>(page.k_sums, fmt.k_sum_bytes(), g * fmt.page_tokens + t, sum);
    }
  }
  std::memcpy(page.v_sums, wire.v_sums, fmt.v_meta() * fmt.v_sum_bytes());
}

template <class S>
void export_codes(const PageFormat& format, const Planes& from, const Planes& to) {
  const HackFormat& fmt = as_hack(format);
  const auto page = hack_page<HackPage>(from), wire = hack_page<HackPage>(to);
  with_width<S>(fmt.k_bits, [&](auto width) { width.k_to_wire(fmt, page.k_codes, wire.k_codes); });
  with_width<S>(fmt.v_bits, [&](auto width) { width.v_to_wire(fmt, page.v_codes, wire.v_codes); });
  transpose<S>(page.k_min, wire.k_min, fmt.k_groups(), fmt.page_tokens);
  transpose<S>(page.k_scale, wire.k_scale, fmt.k_groups(), fmt.page_tokens);
  std::memcpy(wire.v_min, page.v_min, 2 * fmt.v_meta());
  std::memcpy(wire.v_scale, page.v_scale, 2 * fmt.v_meta());
  if (!fmt.sums_at_rest()) return;
  for (int g = 0; g < fmt.k_groups(); ++g) {
    for (int t = 0; t < fmt.page_tokens; ++t) {
      const int sum = load_sum<S>(page.k_sums, fmt.k_sum_bytes(), g * fmt.page_tokens + t);
      store_sum<S>(wire.k_sums, fmt.k_sum_bytes(), t * fmt.k_groups() + g, sum);
    }
  }
  std::memcpy(wire.v_sums, page.v_sums, fmt.v_meta() * fmt.v_sum_bytes());
}

template <class S>
void attend_strips(const HackFormat& fmt, const Pool& pool, const AttendItem& item, const HackQuery& query,
                   State& state, Arena<S> arena) {
  const auto find = [&](std::int64_t first, ConstHackPage* found) {
    for (std::int64_t i = 0; i < kStrip; ++i) {
      const std::int64_t id = item.page_ids[first + i < item.last ? first + i : item.last - 1];
      found[i] = hack_page<ConstHackPage>(pool.page(fmt, id, item.head));
    }
  };
  Strip strip;
  if (item.first < item.last) find(item.first, strip.next);
  for (std::int64_t i = item.first; i < item.last; i += kStrip) {
    strip.pages = int(item.last - i < kStrip ? item.last - i : kStrip);
    std::memcpy(strip.page, strip.next, sizeof strip.page);
    find(i + kStrip, strip.next);
    attend_packed<S>(fmt, strip, query, state, arena);
  }
}

// Attention of a prompt's rows in the symmetric form, with an exact own page.
template <class S, class Codes, class Exact>
void attend_code_lanes(const HackFormat& fmt, const Pool& pool, const AttendItem& item, const HackQuery& query,
                       Arena<S>& arena) {
  const LaneState state = make_lane_state<S>(fmt, query.rows, arena);
  float* scores = arena.template take<float>(std::size_t(S::kLaneVectors) * kLanes * fmt.page_tokens);
  HackLanes<S, Codes> codes(fmt, query, arena);
  Exact exact(fmt, item, query, arena);
  [[maybe_unused]] const typename Codes::Unit unit;
  for (std::int64_t i = item.first; i < item.last; ++i)
    codes.attend(hack_page<ConstHackPage>(pool.page(fmt, item.page_ids[i], item.head)), query.rows, state, scores);
  attend_exact_lanes<S>(fmt, item, exact, state, scores);
  write_lanes<S>(fmt, item, state);
}

template <class S, class Codes, class Exact>
void attend_codes(const PageFormat& format, const Pool& pool, const AttendItem& item, std::byte* scratch) {
  const HackFormat& fmt = as_hack(format);
  Arena<S> arena(scratch);
  const HackQuery query = make_hack_query<S>(fmt, item, arena);
  if (!fmt.asymmetric && !fmt.own_page_rests && !fmt.own_k_codes && query.rows > kPackedRows)
    return attend_code_lanes<S, Codes, Exact>(fmt, pool, item, query, arena);
  State state = make_state<S>(fmt, query.rows, arena);
  const WidePage wide = make_wide_page<S>(fmt, arena);
  const auto widen = [&](std::int64_t id) {
    widen_page<S>(fmt, hack_page<ConstHackPage>(pool.page(fmt, id, item.head)), wide);
  };
  if (!fmt.asymmetric && query.rows <= kPackedRows) {
    attend_strips<S>(fmt, pool, item, query, state, arena);
  } else {
    for (std::int64_t i = item.first; i < item.last; ++i) {
      widen(item.page_ids[i]);
      attend_wide<S>(fmt, wide, query, state, arena);
    }
  }
  if (item.own.total > 0) {
    if (fmt.own_page_rests) {
      widen(item.page_ids[item.last]);
      attend_wide<S>(fmt, wide, query, state, arena, &item);
    } else if (fmt.own_k_codes) {
      attend_own_codes<S>(fmt, item, query, wide, state, arena);
    } else {
      attend_own_exactly<S>(fmt, item, query, state, arena);
    }
  }
  write_state<S>(fmt, item, query.rows, state);
}

template <class S, class Codes, class Exact>
constexpr std::size_t hack_scratch_bytes(const PageFormat& format, int rows) {
  const HackFormat& fmt = as_hack(format);
  const std::size_t padded = padded_rows(rows), d = fmt.head_dim, query = padded * (2 * d + 12 * fmt.k_groups());
  const std::size_t pages = 4 * fmt.elements(), meta = 4 * (6 * fmt.k_meta() + 6 * d + 256);
  const std::size_t lanes = lane_scratch_bytes(fmt, rows) + 4 * S::kLaneVectors * kLanes * std::size_t(fmt.page_tokens) +
                            HackLanes<S, Codes>::scratch_bytes(fmt, rows) + Exact::scratch_bytes(fmt, rows);
  return query_scratch_bytes(fmt, rows) + query + pages + meta + kLanes * std::size_t(fmt.page_tokens) + lanes;
}

template <class S, class Codes = CodeLanes<S>, class Exact = FloatLanes<S>>
constexpr PageOperations hack_operations() {
  return {seal_codes<S>,
          requantize_codes<S>,
          install_codes<S>,
          export_codes<S>,
          attend_codes<S, Codes, Exact>,
          hack_scratch_bytes<S, Codes, Exact>,
          96};
}

}  // namespace hack
