#include "attention.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "thread_pool.h"

namespace hack {
namespace {

constexpr int kItemsPerThread = 8;     // so many that a slow thread delays the call little
constexpr std::int64_t kMinSplit = 4;  // pages

void check(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

std::int64_t ceil_div(std::int64_t x, std::int64_t y) {
  return (x + y - 1) / y;
}

std::string name_of(std::int64_t b) {
  return "sequence " + std::to_string(b);
}

// The batch has `total` rows. With `own_rests`, the page of a span's last row is in the pool too.
void check_span(const PageFormat& fmt, const Pool& pool, const Spans& spans, std::int64_t total, bool own_rests,
                std::int64_t b) {
  const std::string which = name_of(b);
  const std::int64_t start = spans.starts[b], count = spans.counts[b], offset = spans.offsets[b];
  check(start >= 0 && count > 0, which + " has a bad start or count");
  check(offset >= 0 && offset + count <= total, which + " lies outside the batch's rows");
  const std::int64_t pages = (start + count - 1) / fmt.page_tokens + (own_rests ? 1 : 0);
  check(pages <= spans.width, which + " has more pages than the table");
  for (int list = 0; list < spans.lists; ++list)
    for (std::int64_t p = 0; p < pages; ++p) {
      const std::int64_t id = spans.pages(b, list)[p];
      check(id >= 0 && id < pool.pages, which + " refers to page " + std::to_string(id) + " outside the pool");
    }
}

// The number of pages that an item reads, as codes or exactly. Its own page counts.
std::int64_t pages_of(const AttendItem& item) {
  return item.last - item.first + item.earlier_count + 1;
}

class Planner {
 public:
  Planner(const PageFormat& fmt, int layer, const Pool& pool, const Slots& slots, const Spans& spans,
          const Rows& rows)
      : fmt_(fmt),
        layer_(layer),
        pool_(pool),
        slots_(slots),
        spans_(spans),
        rows_(rows),
        group_(rows.q_heads / pool.heads) {}

  // Whole items, the longest first.
  std::vector<AttendItem> items() const {
    std::vector<AttendItem> out;
    for (std::int64_t b = 0; b < spans_.batch; ++b) {
      check_span(fmt_, pool_, spans_, rows_.total, fmt_.own_page_rests, b);
      check(rows_.k != nullptr || spans_.counts[b] == 1, name_of(b) + " has several rows in decode");
      check(spans_.slots[b] >= 0 && spans_.slots[b] < slots_.count, name_of(b) + " has a slot outside the pool");
      const std::int64_t end = spans_.starts[b] + spans_.counts[b];
      for (std::int64_t at = spans_.starts[b]; at < end;) {
        const std::int64_t page_end = std::min(end, (at / fmt_.page_tokens + 1) * fmt_.page_tokens);
        const std::int64_t parts = ceil_div((page_end - at) * group_, kItemRows);  // of even size
        const std::int64_t stop = at + ceil_div(page_end - at, parts);
        for (int head = 0; head < pool_.heads; ++head) out.push_back(item(b, head, at, stop));
        at = stop;
      }
    }
    std::stable_sort(out.begin(), out.end(),
                     [](const AttendItem& a, const AttendItem& b) { return pages_of(a) > pages_of(b); });
    return out;
  }

 private:
  AttendItem item(std::int64_t b, int head, std::int64_t at, std::int64_t stop) const {
    const std::int64_t row = spans_.offsets[b] + at - spans_.starts[b], page = at / fmt_.page_tokens;
    const std::int64_t head_bytes = std::int64_t(group_) * fmt_.head_dim * bytes_of(rows_.dtype);
    const std::int64_t out_stride = pool_.heads * head_bytes;
    const Window& window = fmt_.window;
    AttendItem item{.q = rows_.q + row * rows_.q_stride + head * head_bytes,
            .out = rows_.out + row * out_stride + head * head_bytes,
            .dtype = rows_.dtype,
            .q_stride = rows_.q_stride,
            .out_stride = out_stride,
            .group = group_,
            .tokens = int(stop - at),
            .head = head,
            .page_ids = spans_.pages(b, head),
            .first = window.first_coded(page),
            .last = window.last_coded(page),
            .earlier = {},
            .earlier_count = 0,
            .own = exact_rows(b, head, page, stop),
            .visible = int(at - page * fmt_.page_tokens) + 1,
            .partial = nullptr};
    const auto see_exactly = [&](std::int64_t g) { item.earlier[item.earlier_count++] = exact_rows(b, head, g, stop); };
    for (std::int64_t g = 0; g < item.first; ++g) see_exactly(g);
    for (std::int64_t g = item.last; g < page; ++g) see_exactly(g);
    return item;
  }

  // The rows of a page before row `stop`.
  ExactRows exact_rows(std::int64_t b, int head, std::int64_t page, std::int64_t stop) const {
    const std::int64_t begin = page * fmt_.page_tokens, start = spans_.starts[b];
    const std::int64_t stride = std::int64_t(pool_.heads) * fmt_.head_dim;
    const std::int64_t slot = (spans_.slots[b] * pool_.heads + head) * fmt_.window.pages() + fmt_.window.place(page);
    const std::int64_t at = slot * std::int64_t(fmt_.elements());
    const int total = int(std::min<std::int64_t>(stop - begin, fmt_.page_tokens));
    ExactRows rows{slots_.k + at, slots_.v + at, total, nullptr, nullptr,
                   stride,        total,         Place{layer_, pool_.head_start + head, begin}};
    if (rows_.k == nullptr) return rows;
    rows.old = int(std::clamp<std::int64_t>(start - begin, 0, total));
    const std::int64_t first = spans_.offsets[b] + std::max(begin - start, std::int64_t(0));
    rows.k = rows_.k + first * stride + std::int64_t(head) * fmt_.head_dim;
    rows.v = rows_.v + first * stride + std::int64_t(head) * fmt_.head_dim;
    return rows;
  }

  const PageFormat& fmt_;
  int layer_;
  const Pool& pool_;
  const Slots& slots_;
  const Spans& spans_;
  const Rows& rows_;
  int group_;
};

int rows_of(const AttendItem& item) {
  return item.tokens * item.group;
}

// Passes of 4 rows over each page.
std::int64_t passes_of(const AttendItem& item) {
  return (rows_of(item) + 3) / 4;
}

// Whole items cut into ranges of pages, so that a few long sequences still fill all threads. The thread that finishes
// the last part of an item merges its parts.
class Splits {
 public:
  Splits(const PageFormat& fmt, const std::vector<AttendItem>& items, std::int64_t most) {
    for (const AttendItem& item : items) {
      const std::int64_t pages = std::max(kMinSplit, most / std::max<std::int64_t>(1, passes_of(item)));
      const int count = int(std::max<std::int64_t>(1, (item.last - item.first + pages - 1) / pages));
      for (int s = 0; s < count; ++s) parts_.push_back({wholes_.size(), s});
      const std::int64_t floats = count > 1 ? count * partial_floats(fmt, rows_of(item)) : 0;
      wholes_.push_back({item, count, count, std::vector<float>(std::size_t(floats))});
    }
  }

  std::int64_t size() const { return std::int64_t(parts_.size()); }

  void run(std::int64_t index, Attend* attend, const Operations& operations, const PageFormat& fmt, const Pool& pool,
           std::byte* scratch) {
    const Part& part = parts_[std::size_t(index)];
    Whole& whole = wholes_[part.whole];
    attend(fmt, pool, item_of(fmt, whole, part.split), scratch);
    if (whole.splits > 1 && std::atomic_ref(whole.left).fetch_sub(1, std::memory_order_acq_rel) == 1)
      operations.merge(fmt, {whole.partials.data(), whole.splits, whole.item});
  }

 private:
  struct Whole {
    AttendItem item;
    int splits;
    int left;  // parts that have not finished; counted by all threads
    std::vector<float> partials;
  };
  struct Part {
    std::size_t whole;
    int split;
  };

  // The last part also takes the pages that are seen exactly.
  static AttendItem item_of(const PageFormat& fmt, Whole& whole, int split) {
    AttendItem item = whole.item;
    if (whole.splits == 1) return item;
    const std::int64_t coded = whole.item.last - whole.item.first;
    item.first = whole.item.first + coded * split / whole.splits;
    item.last = whole.item.first + coded * (split + 1) / whole.splits;
    item.partial = whole.partials.data() + split * partial_floats(fmt, rows_of(item));
    if (split + 1 < whole.splits) item.own.total = item.earlier_count = 0;
    return item;
  }

  std::vector<Whole> wholes_;
  std::vector<Part> parts_;
};

void check_heads(const PageFormat& fmt, const Pool& pool) {
  const bool known = fmt.known_heads == 0 || pool.head_start + pool.heads <= fmt.known_heads;
  check(known, "pool has heads that the format does not know");
}

}  // namespace

void Engine::attend(const PageFormat& fmt, int layer, const Pool& pool, const Slots& slots, const Spans& spans,
                    const Rows& rows) const {
  check_heads(fmt, pool);
  const std::vector<AttendItem> items = Planner(fmt, layer, pool, slots, spans, rows).items();
  std::int64_t work = 0;
  int most_rows = 0;
  for (const AttendItem& item : items) {
    work += pages_of(item) * passes_of(item);
    most_rows = std::max(most_rows, rows_of(item));
  }
  const PageOperations& pages = operations.pages[int(fmt.kind)];
  const int workers = work <= pages.alone_work ? 1 : threads;
  const std::int64_t per_item = workers == 1 ? work : work / (std::int64_t(workers) * kItemsPerThread) + 1;
  Splits splits(fmt, items, per_item);
  const std::size_t bytes = pages.scratch_bytes(fmt, most_rows);
  parallel_for(workers, splits.size(),
               [&](std::int64_t i) { splits.run(i, pages.attend, operations, fmt, pool, thread_scratch(bytes)); });
}

void Engine::seal(const PageFormat& fmt, int layer, const Pool& pool, PageList pages, const std::int64_t* starts,
                  const std::uint16_t* k, const std::uint16_t* v) const {
  const PageOperations& of_kind = operations.pages[int(fmt.kind)];
  check(of_kind.seal != nullptr, "pages of this kind are sealed by copying rows");
  check_heads(fmt, pool);
  const std::size_t bytes = of_kind.scratch_bytes(fmt, 1);
  const std::int64_t count = pages.count * pool.heads;
  parallel_for(count > 2 ? threads : 1, count, [&](std::int64_t i) {
    const int head = int(i % pool.heads);
    const std::int64_t page = i / pool.heads;
    const std::size_t rows = std::size_t(i) * fmt.elements();
    of_kind.seal(fmt, {layer, pool.head_start + head, starts[page]}, k + rows, v + rows,
                 pool.page(fmt, pages.ids[page], head), thread_scratch(bytes));
  });
}

void Engine::requantize(const PageFormat& fmt, int layer, const Pool& pool, const Spans& spans, std::int64_t total,
                        const std::uint16_t* k, const std::uint16_t* v) const {
  const PageOperations& of_kind = operations.pages[int(fmt.kind)];
  check(of_kind.requantize != nullptr, "pages of this kind take no further rows");
  struct Part {
    std::int64_t page_id, begin;  // of the page
    std::int64_t row;             // first of the batch that joins it
    int old, count;
  };
  std::vector<Part> parts;
  for (std::int64_t b = 0; b < spans.batch; ++b) {
    check_span(fmt, pool, spans, total, true, b);
    const std::int64_t start = spans.starts[b], end = start + spans.counts[b];
    for (std::int64_t at = start; at < end;) {
      const std::int64_t page = at / fmt.page_tokens, begin = page * fmt.page_tokens;
      const std::int64_t stop = std::min(end, begin + fmt.page_tokens);
      parts.push_back(
          {spans.pages(b, 0)[page], begin, spans.offsets[b] + at - start, int(at - begin), int(stop - at)});
      at = stop;
    }
  }
  const std::size_t bytes = of_kind.scratch_bytes(fmt, 1);
  const std::int64_t count = std::int64_t(parts.size()) * pool.heads, stride = std::int64_t(pool.heads) * fmt.head_dim;
  parallel_for(count > 2 ? threads : 1, count, [&](std::int64_t i) {
    const Part& part = parts[std::size_t(i / pool.heads)];
    const int head = int(i % pool.heads);
    const std::int64_t first = part.row * stride + std::int64_t(head) * fmt.head_dim;
    of_kind.requantize(fmt, {layer, pool.head_start + head, part.begin},
                       {k + first, v + first, stride, part.old, part.count}, pool.page(fmt, part.page_id, head),
                       thread_scratch(bytes));
  });
}

void Engine::install(const PageFormat& fmt, const Pool& pool, PageList pages, const ConstPlanes& wire) const {
  const PageOperations& of_kind = operations.pages[int(fmt.kind)];
  check(of_kind.install != nullptr, "pages of this kind are installed by copying");
  const std::size_t bytes = of_kind.scratch_bytes(fmt, 1);
  const std::int64_t count = pages.count * pool.heads;
  parallel_for(count > 4 ? threads : 1, count, [&](std::int64_t i) {
    const std::int64_t head = i % pool.heads, page = i / pool.heads;
    of_kind.install(fmt, advance(fmt, wire, std::size_t(head * pages.count + page)),
                    pool.page(fmt, pages.ids[page], int(head)), thread_scratch(bytes));
  });
}

void Engine::export_pages(const PageFormat& fmt, const Pool& pool, PageList pages, const Planes& wire) const {
  const PageOperations& of_kind = operations.pages[int(fmt.kind)];
  check(of_kind.export_page != nullptr, "pages of this kind are exported by copying");
  const std::int64_t count = pages.count * pool.heads;
  parallel_for(count > 4 ? threads : 1, count, [&](std::int64_t i) {
    const std::int64_t head = i % pool.heads, page = i / pool.heads;
    of_kind.export_page(fmt, pool.page(fmt, pages.ids[page], int(head)),
                        advance(fmt, wire, std::size_t(head * pages.count + page)));
  });
}

void Engine::read(const PageFormat& fmt, const Pool& pool, PageList pages, std::uint16_t* k, std::uint16_t* v) const {
  const PageOperations& of_kind = operations.pages[int(fmt.kind)];
  check(of_kind.read != nullptr, "pages of this kind are not read as rows");
  check_heads(fmt, pool);
  const std::size_t bytes = of_kind.scratch_bytes(fmt, 1);
  const std::int64_t count = pages.count * pool.heads;
  parallel_for(count > 4 ? threads : 1, count, [&](std::int64_t i) {
    const std::size_t rows = std::size_t(i) * fmt.elements();
    of_kind.read(fmt, pool, pages.ids[i / pool.heads], int(i % pool.heads), k + rows, v + rows, thread_scratch(bytes));
  });
}

}  // namespace hack
