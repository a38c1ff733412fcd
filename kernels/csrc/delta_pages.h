// Kind::kDeltas: rows that are differences from the first row of their group (CacheGen). When a page is opened, its
// anchors become FP32 rows in a thread's scratch memory. Deltas are added to them where they are read.
#pragma once

#include "delta_format.h"
#include "rows.h"

namespace hack {

// n / d rounded once, for integers up to 127 in magnitude, without a division: they are slow. The definition
// (delta_format.py) divides, and rows that become FP16 show every difference.
template <class S>
[[gnu::always_inline]] inline typename S::F small_quotient(typename S::F n, float d) {
  const auto inverse = S::splat(1.0f / d), near = S::mul(n, inverse);
  return S::fused(S::fused(S::splat(-d), near, n), inverse, near);
}

// What a reader needs to know of each row of a page, [Π]. An anchor is itself plus a delta with the reach 0, so that it
// needs no branch; its codes are those of some other row.
struct DeltaRow {
  const float* anchor;  // of the row's group
  float reach;
  int at;  // the row's number among the rows that have deltas
};

template <class S, int bits>
struct DeltaRows {
  PackedRows<S, bits> codes;
  float centre;
  const DeltaRow* rows;

  [[gnu::always_inline]] typename S::F at(int t, int c) const {
    const DeltaRow& row = rows[t];
    const auto steps = S::sub(S::bytes_to_float(codes.at(row.at, c)), S::splat(centre));
    return S::add(S::load(row.anchor + c), S::mul(small_quotient<S>(steps, centre), S::splat(row.reach)));
  }
  [[gnu::always_inline]] void fetch(int t, int c) const { codes.fetch(rows[t].at, c); }
};

// 16 channels of an anchor from its codes, as the definition computes them: deltas are taken from these values.
template <class S>
[[gnu::always_inline]] inline typename S::F read_anchor(typename S::F codes, float largest) {
  const float centre = kAnchorCentre;
  return S::mul(small_quotient<S>(S::sub(codes, S::splat(centre)), centre), S::splat(largest));
}

// use(group, its first row, the row after its last): the first row is the anchor.
template <class Use>
[[gnu::always_inline]] inline void each_group(const DeltaFormat& fmt, Use use) {
  for (int group = 0, first = 0; first < fmt.page_tokens; ++group, first += fmt.group)
    use(group, first, std::min(first + fmt.group, fmt.page_tokens));
}

template <class S>
class DeltaPages {
 public:
  static constexpr int kRestingRows = 8;

  DeltaPages(const PageFormat& format, const Pool& pool, int head, Arena<S>& arena)
      : fmt_(as_deltas(format)), pool_(pool), head_(head), k_(take(arena)), v_(take(arena)) {}

  void open(std::int64_t id, std::int64_t next) {
    page_ = delta_sides<ConstDeltas>(fmt_, pool_.page(fmt_, id, head_));
    next_ = delta_sides<ConstDeltas>(fmt_, pool_.page(fmt_, next, head_));
    open_side(page_.k, k_);
    open_side(page_.v, v_);
  }
  template <class Use>
  [[gnu::always_inline]] void with_keys(Use use) const {
    with_readers(fmt_.k, page_.k, next_.k, k_, use);
  }
  template <class Use>
  [[gnu::always_inline]] void with_values(Use use) const {
    with_readers(fmt_.v, page_.v, next_.v, v_, use);
  }

 private:
  struct Opened {
    float* anchors;  // [A, D]
    DeltaRow* rows;  // [Π]
  };

  // Rows have the same places in every page.
  Opened take(Arena<S>& arena) {
    const Opened opened{arena.template take<float>(std::size_t(fmt_.anchors() * fmt_.head_dim)),
                        arena.template take<DeltaRow>(std::size_t(fmt_.page_tokens))};
    each_group(fmt_, [&](int group, int first, int end) {
      const float* anchor = opened.anchors + group * fmt_.head_dim;
      opened.rows[first] = {anchor, 0.0f, 0};
      for (int t = first + 1; t < end; ++t) opened.rows[t] = {anchor, 0.0f, t - group - 1};
    });
    return opened;
  }

  void open_side(const ConstDeltas& side, const Opened& to) const {
    const int d = fmt_.head_dim;
    each_group(fmt_, [&](int group, int first, int end) {
      const float largest = half_to_float(side.scale[first]);
      for (int c = group * d; c < (group + 1) * d; c += kLanes)
        S::store(to.anchors + c, read_anchor<S>(S::bytes_to_float(S::load_bytes(side.anchors + c)), largest));
      for (int t = first + 1; t < end; ++t) to.rows[t].reach = half_to_float(side.scale[t]) * 2.0f;
    });
  }

  template <class Use>
  [[gnu::always_inline]] void with_readers(const DeltaSide& of, const ConstDeltas& side, const ConstDeltas& next,
                                           const Opened& opened, Use use) const {
    DeltaWidths::with(of.bits, [&](auto bits) __attribute__((always_inline)) {
      const auto reader = [&](const ConstDeltas& from) -> DeltaRows<S, bits> {
        return {{from.codes, from.high, fmt_.head_dim}, float(of.centre), opened.rows};
      };
      use(reader(side), reader(next));
    });
  }

  const DeltaFormat& fmt_;
  const Pool& pool_;
  int head_;
  Opened k_, v_;
  DeltaSides<ConstDeltas> page_{}, next_{};
};

// Quantizes K or V of a page; reference/deltas.py has the definition.
template <class S>
void quantize_deltas(const DeltaFormat& fmt, const DeltaSide& of, const std::uint16_t* rows, const Deltas& to,
                     Arena<S> arena) {
  const int d = fmt.head_dim, whole = (fmt.others() + 7) / 8 * 8;
  auto* codes = arena.template take<std::uint8_t>(std::size_t(whole * d));
  std::fill(codes + fmt.others() * d, codes + whole * d, std::uint8_t(0));
  alignas(64) float x[kMaxHeadDim], anchor[kMaxHeadDim];
  std::uint8_t* of_row = codes;
  each_group(fmt, [&](int group, int first, int end) {
    const std::uint16_t* row = rows + std::size_t(first) * d;
    std::uint8_t* of_anchor = to.anchors + std::size_t(group) * d;
    for (int c = 0; c < d; c += kLanes) S::store(x + c, S::load_half(row + c));
    const float most = largest_magnitude<S>(x, d), largest = most == 0.0f ? 1.0f : most;
    to.scale[first] = float_to_half(largest);
    store_around<S>(x, d, kAnchorCentre, largest, of_anchor);
    for (int c = 0; c < d; c += kLanes)
      S::store(anchor + c, read_anchor<S>(S::bytes_to_float(S::load_bytes(of_anchor + c)), largest));
    for (int t = first + 1; t < end; ++t, of_row += d) {
      row += d;
      for (int c = 0; c < d; c += kLanes) S::store(x + c, S::sub(S::load_half(row + c), S::load(anchor + c)));
      const std::uint16_t half = float_to_half_up(largest_magnitude<S>(x, d) * 0.5f);
      to.scale[t] = half == 0 ? float_to_half(1.0f) : half;
      store_around<S>(x, d, of.centre, half_to_float(to.scale[t]) * 2.0f, of_row);
    }
  });
  pack_rows<S>(codes, fmt.others(), d, of.bits, to.codes, to.high);
}

template <class S>
void seal_deltas(const PageFormat& format, Place, const std::uint16_t* k, const std::uint16_t* v, const Planes& planes,
                 std::byte* scratch) {
  const DeltaFormat& fmt = as_deltas(format);
  const auto page = delta_sides<Deltas>(fmt, planes);
  quantize_deltas<S>(fmt, fmt.k, k, page.k, Arena<S>(scratch));
  quantize_deltas<S>(fmt, fmt.v, v, page.v, Arena<S>(scratch));
}

template <class S>
constexpr std::size_t delta_scratch_bytes(const PageFormat& format, int rows) {
  const DeltaFormat& fmt = as_deltas(format);
  const std::size_t opened = 4 * std::size_t(fmt.anchors() * fmt.head_dim) + sizeof(DeltaRow) * fmt.page_tokens;
  return rows_scratch_bytes<S>(format, rows) + 2 * opened + 64 * 6;
}

template <class S>
constexpr PageOperations delta_operations() {
  return reading_operations<S, DeltaPages<S>>(seal_deltas<S>, delta_scratch_bytes<S>);
}

}  // namespace hack
