// The operations of work.h for one instruction set S.
#pragma once

#include "dots.h"
#include "own_page.h"
#include "packed.h"
#include "quantize.h"
#include "requantize.h"
#include "rows.h"
#include "rowwise.h"
#include "tile.h"
#include "work.h"

namespace hack {

template <class S>
ConstPage page_at(const Format& fmt, const Pool& pool, std::int64_t id, int head) {
  const std::size_t n = std::size_t(id) * pool.heads + head, k = n * fmt.k_meta(), v = n * fmt.v_meta();
  const Page& p = pool.base;
  const bool sums = p.k_sums != nullptr;
  return {p.k_codes + n * fmt.k_code_bytes(),
          p.k_min + k,
          p.k_scale + k,
          sums ? p.k_sums + k * fmt.k_sum_bytes() : nullptr,
          p.v_codes + n * fmt.v_code_bytes(),
          p.v_min + v,
          p.v_scale + v,
          sums ? p.v_sums + v * fmt.v_sum_bytes() : nullptr};
}

template <class S>
void pack_codes(const Format& fmt, const std::uint8_t* k, const std::uint8_t* v, const Page& page) {
  fmt.k_bits == 2 ? pack_k<S, 2>(fmt, k, page.k_codes) : pack_k<S, 4>(fmt, k, page.k_codes);
  fmt.v_bits == 2 ? pack_v<S, 2>(fmt, v, page.v_codes) : pack_v<S, 4>(fmt, v, page.v_codes);
}

template <class S>
void seal(const Format& fmt, Place place, const std::uint16_t* k, const std::uint16_t* v, const Page& page,
          std::byte* scratch) {
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
void recount_sums(const Format& fmt, const Page& page, std::byte* scratch) {
  Arena<S> arena(scratch);
  auto* k = arena.template take<std::uint8_t>(fmt.elements());
  auto* v = arena.template take<std::uint8_t>(fmt.elements());
  fmt.k_bits == 2 ? unpack_k<S, 2>(fmt, page.k_codes, k) : unpack_k<S, 4>(fmt, page.k_codes, k);
  fmt.v_bits == 2 ? unpack_v<S, 2>(fmt, page.v_codes, v) : unpack_v<S, 4>(fmt, page.v_codes, v);
  count_k_sums<S>(fmt, 0, k, page);
  count_v_sums<S>(fmt, v, page);
}

template <class S>
void install(const Format& fmt, const ConstPage& wire, const Page& page, std::byte* scratch) {
  fmt.k_bits == 2 ? k_from_wire<S, 2>(fmt, wire.k_codes, page.k_codes)
                  : k_from_wire<S, 4>(fmt, wire.k_codes, page.k_codes);
  fmt.v_bits == 2 ? v_from_wire<S, 2>(fmt, wire.v_codes, page.v_codes)
                  : v_from_wire<S, 4>(fmt, wire.v_codes, page.v_codes);
  transpose<S>(wire.k_min, page.k_min, fmt.page_tokens, fmt.k_groups());
  transpose<S>(wire.k_scale, page.k_scale, fmt.page_tokens, fmt.k_groups());
  std::memcpy(page.v_min, wire.v_min, 2 * fmt.v_meta());
  std::memcpy(page.v_scale, wire.v_scale, 2 * fmt.v_meta());
  if (!fmt.sums_at_rest()) return;
  if (wire.k_sums == nullptr) {
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
void export_page(const Format& fmt, const Page& page, const Page& wire) {
  fmt.k_bits == 2 ? k_to_wire<S, 2>(fmt, page.k_codes, wire.k_codes) : k_to_wire<S, 4>(fmt, page.k_codes, wire.k_codes);
  fmt.v_bits == 2 ? v_to_wire<S, 2>(fmt, page.v_codes, wire.v_codes) : v_to_wire<S, 4>(fmt, page.v_codes, wire.v_codes);
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

// The pages of one KV head, whose sizes are worked out once; without sums, which the symmetric form does not read.
template <class S>
struct HeadPages {
  HeadPages(const Format& fmt, const Pool& pool, int head)
      : first(page_at<S>(fmt, pool, 0, head)),
        k_code_bytes(pool.heads * fmt.k_code_bytes()),
        v_code_bytes(pool.heads * fmt.v_code_bytes()),
        k_meta(pool.heads * fmt.k_meta()),
        v_meta(pool.heads * fmt.v_meta()) {}

  ConstPage at(std::int64_t id) const {
    const std::size_t n = std::size_t(id), k = n * k_meta, v = n * v_meta;
    return {first.k_codes + n * k_code_bytes, first.k_min + k, first.k_scale + k, nullptr,
            first.v_codes + n * v_code_bytes, first.v_min + v, first.v_scale + v, nullptr};
  }

  ConstPage first;
  std::size_t k_code_bytes, v_code_bytes, k_meta, v_meta;  // between one page and the next
};

template <class S>
void attend_strips(const Format& fmt, const Pool& pool, const AttendItem& item, const Query& query, State& state,
                   Arena<S> arena) {
  const HeadPages<S> pages(fmt, pool, item.head);
  const auto find = [&](std::int64_t first, ConstPage* found) {
    for (std::int64_t i = 0; i < kStrip; ++i)
      found[i] = pages.at(item.page_ids[first + i < item.last ? first + i : item.last - 1]);
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

template <class S>
void attend(const Format& fmt, const Pool& pool, const AttendItem& item, std::byte* scratch) {
  Arena<S> arena(scratch);
  const Query query = make_query<S>(fmt, item, arena);
  State state = make_state<S>(fmt, query.rows, arena);
  const WidePage wide = make_wide_page<S>(fmt, arena);
  if (!fmt.asymmetric && query.rows <= kPackedRows) {
    attend_strips<S>(fmt, pool, item, query, state, arena);
  } else {
    for (std::int64_t i = item.first; i < item.last; ++i) {
      widen_page<S>(fmt, page_at<S>(fmt, pool, item.page_ids[i], item.head), wide);
      attend_wide<S>(fmt, wide, query, state, arena);
    }
  }
  if (item.own.total > 0) {
    if (fmt.own_v_codes) {
      widen_page<S>(fmt, page_at<S>(fmt, pool, item.page_ids[item.last], item.head), wide);
      attend_wide<S>(fmt, wide, query, state, arena, &item);
    } else {
      attend_own<S>(fmt, item, query, wide, state, arena);
    }
  }
  write_state<S>(fmt, item, query.rows, state);
}

template <class S>
void merge(const Format& fmt, const MergeItem& item) {
  const int rows = item.whole.tokens * item.whole.group;
  const std::int64_t size = partial_floats(fmt, rows);
  for (int r = 0; r < rows; ++r) {
    alignas(64) float out[kMaxHeadDim] = {};
    float top = item.partials[r], weight = 0.0f;
    for (int s = 1; s < item.splits; ++s) top = item.partials[s * size + r] > top ? item.partials[s * size + r] : top;
    for (int s = 0; s < item.splits; ++s) {
      const float* partial = item.partials + s * size;
      alignas(64) float factor[kLanes];
      S::store(factor, exp2<S>(S::splat(partial[r] - top)));
      weight += factor[0] * partial[rows + r];
      const float* values = partial + 2 * rows + std::int64_t(r) * fmt.head_dim;
      for (int d = 0; d < fmt.head_dim; d += kLanes)
        S::store(out + d, S::fma(S::splat(factor[0]), S::load(values + d), S::load(out + d)));
    }
    write_row<S>(fmt, item.whole, r, out, weight);
  }
}

template <class S>
constexpr Operations operations_of() {
  return {S::name,
          seal<S>,
          requantize<S>,
          install<S>,
          export_page<S>,
          attend<S>,
          attend_rows<S>,
          merge<S>,
          dots<S>,
          {row_operations_of<S, Dtype::kFloat>(), row_operations_of<S, Dtype::kHalf>(),
           row_operations_of<S, Dtype::kBfloat>()}};
}

}  // namespace hack
