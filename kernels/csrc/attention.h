// Whole calls: a batch is cut into items of work, which threads take one by one.
#pragma once

#include "work.h"

namespace hack {

struct Spans {
  const std::int64_t* starts;
  const std::int64_t* counts;
  const std::int64_t* offsets;
  const std::int64_t* table;  // [batch, lists, width]
  const std::int64_t* slots;
  std::int64_t batch;
  int lists;  // 1, or one for each KV head, which then reads pages of its own choice
  std::int64_t width;

  const std::int64_t* pages(std::int64_t b, int head) const {
    return table + (b * lists + (lists == 1 ? 0 : head)) * width;
  }
};

// Exact rows of sequences in flight, E pages in each slot, in the order of `Window`.
struct Slots {
  const std::uint16_t* k;  // [count, heads, E·Π, D]
  const std::uint16_t* v;
  std::int64_t count;
};

// Rows of one call. In decode k and v are null: the rows are in the slots already.
struct Rows {
  const std::byte* q;  // [total, q_heads, D], tokens q_stride bytes apart
  std::int64_t q_stride;
  std::byte* out;  // [total, q_heads, D]
  Dtype dtype;
  const std::uint16_t* k;  // [total, heads, D]
  const std::uint16_t* v;
  std::int64_t total;
  int q_heads;
};

// Pages of a pool that one call seals, installs or exports.
struct PageList {
  const std::int64_t* ids;
  std::int64_t count;
};

struct Engine {
  const Operations& operations;
  int threads;

  // Every operation raises std::invalid_argument if spans point outside their tensors or the kind of page lacks the
  // operation.
  void attend(const PageFormat& fmt, int layer, const Pool& pool, const Slots& slots, const Spans& spans,
              const Rows& rows) const;
  // k, v [count, heads, Π, D].
  void seal(const PageFormat& fmt, int layer, const Pool& pool, PageList pages, const std::int64_t* starts,
            const std::uint16_t* k, const std::uint16_t* v) const;
  // Appends rows [total, heads, D] of all spans to their pages, which are codes from the first row on (REQUANTIZE).
  void requantize(const PageFormat& fmt, int layer, const Pool& pool, const Spans& spans, std::int64_t total,
                  const std::uint16_t* k, const std::uint16_t* v) const;
  // wire planes [heads, count, plane].
  void install(const PageFormat& fmt, const Pool& pool, PageList pages, const ConstPlanes& wire) const;
  void export_pages(const PageFormat& fmt, const Pool& pool, PageList pages, const Planes& wire) const;
  // Pages as FP16 rows k, v [count, heads, Π, D].
  void read(const PageFormat& fmt, const Pool& pool, PageList pages, std::uint16_t* k, std::uint16_t* v) const;
};

}  // namespace hack
