// Kind::kLevels: the engine's operations on pages of levels, on one instruction set S.
#pragma once

#include "level_packed.h"
#include "level_quantize.h"
#include "level_tile.h"
#include "own_page.h"

namespace hack {

template <class S>
void seal_levels(const PageFormat& format, Place place, const std::uint16_t* k, const std::uint16_t* v,
                 const Planes& planes, std::byte* scratch) {
  const LevelFormat& fmt = as_levels(format);
  const auto page = level_page<LevelPage>(fmt, planes);
  Arena<S> arena(scratch);
  LevelWidths::with(fmt.k_bits, [&](auto bits) {
    quantize_levels<S, bits, true>(fmt, k, fmt.feedback_of(place.head), page.k, arena);
  });
  LevelWidths::with(fmt.v_bits, [&](auto bits) { quantize_levels<S, bits, false>(fmt, v, {}, page.v, arena); });
}

// Moves the highest bits of K between the wire's order (a byte for 8 tokens of a channel) and the order at rest.
template <class S, bool to_wire>
void move_k_highest(const PageFormat& fmt, const std::uint8_t* from, std::uint8_t* to) {
  constexpr std::uint32_t ones = 0x01010101u;
  const int chunks = fmt.head_dim / kLanes;
  for (int t = 0; t < fmt.page_tokens; t += 8) {
    const int half = t % kSealedRows / kLanes * 4;
    for (int c = 0; c < chunks; ++c) {
      const int on_wire = (t / 8 * chunks + c) * 4;
      const int at_rest = (t / kSealedRows * chunks + c) * kLanes + t % kLanes;
      const Word* in = words_of(from) + (to_wire ? at_rest : on_wire);
      Word* out = words_of(to) + (to_wire ? on_wire : at_rest);
      if constexpr (to_wire) {
        for (int f = 0; f < 4; ++f) {
          Word word = 0;
          for (int i = 0; i < 8; ++i) word |= (in[i] >> (half + f) & ones) << i;
          out[f] = word;
        }
      } else {
        for (int i = 0; i < 8; ++i) {
          Word word = half == 0 ? 0 : out[i];
          for (int f = 0; f < 4; ++f) word |= (in[f] >> i & ones) << (half + f);
          out[i] = word;
        }
      }
    }
  }
}

// Moves codes between the wire's order and the order at rest. Scales are the same in both.
template <class S, bool to_wire, class From>
void move_levels(const LevelFormat& fmt, const From& from, const LevelPage& to) {
  LevelWidths::with(fmt.k_bits, [&](auto bits) {
    constexpr int low = low_bits(bits);
    constexpr auto move = to_wire ? k_to_wire<S, low> : k_from_wire<S, low>;
    move(fmt, from.k.codes, to.k.codes);
    if constexpr (bits == 3) move_k_highest<S, to_wire>(fmt, from.k.high, to.k.high);
  });
  LevelWidths::with(fmt.v_bits, [&](auto bits) {
    constexpr int low = low_bits(bits);
    constexpr auto move = to_wire ? v_to_wire<S, low> : v_from_wire<S, low>;
    constexpr auto move_high = to_wire ? v_to_wire<S, 1> : v_from_wire<S, 1>;
    move(fmt, from.v.codes, to.v.codes);
    if constexpr (bits == 3) move_high(fmt, from.v.high, to.v.high);
  });
  std::memcpy(to.k.scale, from.k.scale, fmt.scale_bytes() * fmt.page_tokens);
  std::memcpy(to.v.scale, from.v.scale, fmt.scale_bytes() * fmt.page_tokens);
}

template <class S>
void install_levels(const PageFormat& format, const ConstPlanes& from, const Planes& to, std::byte*) {
  const LevelFormat& fmt = as_levels(format);
  move_levels<S, false>(fmt, level_page<ConstLevelPage>(fmt, from), level_page<LevelPage>(fmt, to));
}

template <class S>
void export_levels(const PageFormat& format, const Planes& from, const Planes& to) {
  const LevelFormat& fmt = as_levels(format);
  move_levels<S, true>(fmt, level_page<LevelPage>(fmt, from), level_page<LevelPage>(fmt, to));
}

template <class S>
void attend_level_strips(const LevelFormat& fmt, const Pool& pool, const AttendItem& item, const LevelQuery& query,
                         State& state, Arena<S> arena) {
  const auto find = [&](std::int64_t first, ConstLevelPage* found) {
    for (std::int64_t i = 0; i < kStrip; ++i) {
      const std::int64_t id = item.page_ids[first + i < item.last ? first + i : item.last - 1];
      found[i] = level_page<ConstLevelPage>(fmt, pool.page(fmt, id, item.head));
    }
  };
  LevelStrip strip;
  if (item.first < item.last) find(item.first, strip.next);
  for (std::int64_t i = item.first; i < item.last; i += kStrip) {
    strip.pages = int(item.last - i < kStrip ? item.last - i : kStrip);
    std::memcpy(strip.page, strip.next, sizeof strip.page);
    find(i + kStrip, strip.next);
    attend_packed_levels<S>(fmt, strip, query, state, arena);
  }
}

template <class S, class Codes, class Exact>
void attend_level_lanes(const LevelFormat& fmt, const Pool& pool, const AttendItem& item, const LevelQuery& query,
                        Arena<S>& arena) {
  const LaneState state = make_lane_state<S>(fmt, query.rows, arena);
  float* scores = arena.template take<float>(std::size_t(S::kLaneVectors) * kLanes * fmt.page_tokens);
  LevelLanes<S, Codes> levels(fmt, query, arena);
  Exact exact(fmt, item, query, arena);
  [[maybe_unused]] const typename Codes::Unit unit;
  for (std::int64_t i = item.first; i < item.last; ++i) {
    levels.attend(level_page<ConstLevelPage>(fmt, pool.page(fmt, item.page_ids[i], item.head)), query.rows, state, scores);
  }
  attend_exact_lanes<S>(fmt, item, exact, state, scores);
  write_lanes<S>(fmt, item, state);
}

// A prompt's rows take the products of `Codes` and `Exact`.
template <class S, class Codes, class Exact>
void attend_levels(const PageFormat& format, const Pool& pool, const AttendItem& item, std::byte* scratch) {
  const LevelFormat& fmt = as_levels(format);
  Arena<S> arena(scratch);
  const LevelQuery query = make_level_query<S>(fmt, item, arena);
  if (query.rows > kPackedRows) return attend_level_lanes<S, Codes, Exact>(fmt, pool, item, query, arena);
  State state = make_state<S>(fmt, query.rows, arena);
  attend_level_strips<S>(fmt, pool, item, query, state, arena);
  attend_earlier_exactly<S>(fmt, item, query, state, arena);
  if (item.own.total > 0) attend_own_exactly<S>(fmt, item, query, state, arena);
  write_state<S>(fmt, item, query.rows, state);
}

template <class S, class Codes, class Exact>
constexpr std::size_t level_scratch_bytes(const PageFormat& format, int rows) {
  const std::size_t padded = padded_rows(rows), d = format.head_dim, pi = format.page_tokens;
  const std::size_t query = (padded + kLanes) * (d + 8) + 64 * 4, sealing = 10 * kSealedRows * d;
  const std::size_t strips = 4 * kTile * pi * (kStrip + 1) + kTile * pi;
  const std::size_t lanes = lane_scratch_bytes(format, rows) + 4 * S::kLaneVectors * kLanes * pi +
                            LevelLanes<S, Codes>::scratch_bytes(as_levels(format), rows) +
                            Exact::scratch_bytes(format, rows);
  return query_scratch_bytes(format, rows) + query + (sealing > lanes + strips ? sealing : lanes + strips);
}

template <class S, class Codes = CodeLanes<S>, class Exact = FloatLanes<S>>
constexpr PageOperations level_operations() {
  PageOperations operations;
  operations.seal = seal_levels<S>;
  operations.install = install_levels<S>;
  operations.export_page = export_levels<S>;
  operations.attend = attend_levels<S, Codes, Exact>;
  operations.scratch_bytes = level_scratch_bytes<S, Codes, Exact>;
  operations.alone_work = 16;
  return operations;
}

}  // namespace hack
