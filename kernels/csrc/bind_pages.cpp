// Operations on pages of a pool, of every format.
#include <nanobind/nanobind.h>

#include "arrays.h"
#include "bindings.h"

namespace hack {
namespace {

// A plane by its name, null where it is missing.
nb::handle find(const nb::dict& planes, const Plane& plane) {
  return PyDict_GetItemString(planes.ptr(), plane.name);
}

// Planes of `pages` pages of one head. Where `complete` is false, derived ones may be missing.
Planes planes_of_dict(const PageFormat& fmt, const nb::dict& planes, std::size_t pages, bool complete) {
  Planes found;
  for (int i = 0; i < fmt.plane_count; ++i) {
    const Plane& plane = fmt.planes[i];
    const nb::handle tensor = find(planes, plane);
    if (tensor.is_valid()) {
      found.at[i] = elements<std::byte>(Array(tensor, plane.name), type_of(plane.element), pages * plane.count);
    } else if (complete || !plane.derived) {
      refuse(std::string("plane ") + plane.name + " is missing");
    }
  }
  return found;
}

// Planes [N, Hkv, ...], contiguous within each page.
Pool pool_of(const PageFormat& fmt, const nb::dict& planes, int head_start) {
  Pool pool{};
  pool.head_start = head_start;
  for (int i = 0; i < fmt.plane_count; ++i) {
    const Plane& plane = fmt.planes[i];
    const nb::handle tensor = find(planes, plane);
    if (!tensor.is_valid()) refuse(std::string("plane ") + plane.name + " is missing");
    const StridedArray pages(tensor, plane.name);
    if (pages.type() != type_of(plane.element)) refuse(plane.name, "has the wrong dtype");
    if (i == 0) {
      pool.pages = pages.strips().count;
      pool.heads = int(pages.elements() / std::int64_t(plane.count));
    }
    if (pages.strips().count != pool.pages || pages.elements() != pool.heads * std::int64_t(plane.count))
      refuse(plane.name, "has the wrong shape");
    pool.planes.at[i] = pages.strips().data;
    pool.page_bytes[i] = std::size_t(pages.strips().stride);
    pool.head_bytes[i] = plane.bytes();
  }
  return pool;
}

PageList page_list(const Pool& pool, const Array& ids) {
  const PageList list{integers(ids, ids.size()), std::int64_t(ids.size())};
  for (std::int64_t i = 0; i < list.count; ++i)
    if (list.ids[i] < 0 || list.ids[i] >= pool.pages) refuse("page_ids lie outside the pool");
  return list;
}

// A sequence has either one list of pages for all heads or `heads` lists.
Spans spans_of(const nb::tuple& spans, std::size_t rows, int heads) {
  if (nb::len(spans) != 5) refuse("spans are (starts, counts, offsets, table, slots)");
  const Array starts(spans[0], "starts"), counts(spans[1], "counts"), offsets(spans[2], "offsets"),
      table(spans[3], "table"), slots(spans[4], "slots");
  if (table.ndim() != 2 && table.ndim() != 3) refuse("table must have two or three dimensions");
  const std::size_t batch = starts.size(), lists = table.ndim() == 3 ? table.shape(1) : 1;
  const std::size_t width = table.shape(table.ndim() - 1);
  if (lists != 1 && lists != std::size_t(heads))
    refuse("table has " + std::to_string(lists) + " lists of pages a sequence; expected 1 or " + std::to_string(heads));
  const auto* each = integers(counts, batch);
  std::int64_t covered = 0;
  for (std::size_t b = 0; b < batch; ++b) covered += each[b];
  if (covered != std::int64_t(rows))
    refuse("spans cover " + std::to_string(covered) + " rows; the batch has " + std::to_string(rows));
  return {.starts = integers(starts, batch),
          .counts = each,
          .offsets = integers(offsets, batch),
          .table = integers(table, batch * lists * width),
          .slots = integers(slots, batch),
          .batch = std::int64_t(batch),
          .lists = int(lists),
          .width = std::int64_t(width)};
}

void seal(const Kernels& kernels, const PageFormat& fmt, int layer, const nb::dict& pages, nb::handle ids,
          nb::handle starts, nb::handle k, nb::handle v, int head_start) {
  const Pool pool = pool_of(fmt, pages, head_start);
  const PageList list = page_list(pool, Array(ids, "page_ids"));
  const std::size_t rows = std::size_t(list.count) * pool.heads * fmt.elements();
  const auto* first = integers(Array(starts, "starts"), std::size_t(list.count));
  const auto *k_rows = halves(Array(k, "k"), rows), *v_rows = halves(Array(v, "v"), rows);
  perform([=, &kernels, &fmt] { kernels.engine().seal(fmt, layer, pool, list, first, k_rows, v_rows); });
}

// spans as in `attend`.
void requantize(const Kernels& kernels, const PageFormat& fmt, int layer, const nb::dict& pages, const nb::tuple& spans,
                nb::handle k, nb::handle v, int head_start) {
  const Pool pool = pool_of(fmt, pages, head_start);
  const Array keys(k, "k"), values(v, "v");
  const std::size_t total = keys.shape(0), heads = std::size_t(pool.heads), d = std::size_t(fmt.head_dim);
  expect_shape(keys, {total, heads, d});
  expect_shape(values, {total, heads, d});
  const Spans where = spans_of(spans, total, 1);
  const auto *k_rows = halves(keys, keys.size()), *v_rows = halves(values, values.size());
  const nb::gil_scoped_release unlocked;
  kernels.engine().requantize(fmt, layer, pool, where, std::int64_t(total), k_rows, v_rows);
}

void install(const Kernels& kernels, const PageFormat& fmt, const nb::dict& pages, nb::handle ids,
             const nb::dict& wire) {
  const Pool pool = pool_of(fmt, pages, 0);
  const PageList list = page_list(pool, Array(ids, "page_ids"));
  const Planes from = planes_of_dict(fmt, wire, std::size_t(list.count) * pool.heads, false);
  ConstPlanes read;
  for (int i = 0; i < fmt.plane_count; ++i) read.at[i] = from.at[i];
  const nb::gil_scoped_release unlocked;
  kernels.engine().install(fmt, pool, list, read);
}

void export_pages(const Kernels& kernels, const PageFormat& fmt, const nb::dict& pages, nb::handle ids,
                  const nb::dict& wire) {
  const Pool pool = pool_of(fmt, pages, 0);
  const PageList list = page_list(pool, Array(ids, "page_ids"));
  const Planes to = planes_of_dict(fmt, wire, std::size_t(list.count) * pool.heads, true);
  const nb::gil_scoped_release unlocked;
  kernels.engine().export_pages(fmt, pool, list, to);
}

// Pages as rows k, v [P, heads, Π, D] in FP16.
void read(const Kernels& kernels, const PageFormat& fmt, const nb::dict& pages, nb::handle ids, nb::handle k,
          nb::handle v, int head_start) {
  const Pool pool = pool_of(fmt, pages, head_start);
  const PageList list = page_list(pool, Array(ids, "page_ids"));
  const std::size_t rows = std::size_t(list.count) * pool.heads * fmt.elements();
  auto* k_rows = elements<std::uint16_t>(Array(k, "k"), Type::kHalf, rows);
  auto* v_rows = elements<std::uint16_t>(Array(v, "v"), Type::kHalf, rows);
  const nb::gil_scoped_release unlocked;
  kernels.engine().read(fmt, pool, list, k_rows, v_rows);
}

// spans: (starts, counts, offsets, table, slots); k and v are None in decode. Tokens of q may lie apart.
void attend(const Kernels& kernels, const PageFormat& fmt, int layer, const nb::dict& pages, nb::handle open_k,
            nb::handle open_v, const nb::tuple& spans, nb::handle queries, nb::handle output, nb::handle k,
            nb::handle v, int head_start) {
  const Pool pool = pool_of(fmt, pages, head_start);
  const Array keys(open_k, "open_k"), values(open_v, "open_v"), out(output, "out");
  const RowArray q(queries, "q");
  const std::size_t heads = std::size_t(pool.heads), d = std::size_t(fmt.head_dim), slots = keys.shape(0);
  const std::size_t rows_of_slot = std::size_t(fmt.window.pages()) * fmt.page_tokens;
  for (const Array* array : {&keys, &values}) expect_shape(*array, {slots, heads, rows_of_slot, d});
  const Slots exact{halves(keys, keys.size()), halves(values, keys.size()), std::int64_t(slots)};
  if (q.inner() != std::int64_t(d) || q.elements() % std::int64_t(heads * d))
    refuse("q is " + in_words(shape_of(queries)) + "; expected [T, a multiple of " + std::to_string(heads) +
           " heads, " + std::to_string(d) + "]");
  const std::size_t total = std::size_t(q.strips().count);
  if (out.size() != total * std::size_t(q.elements()) || float_dtype(out.type(), "out") != q.dtype())
    refuse("out must be like q");
  if (k.is_none() != v.is_none()) refuse("k and v are given together or not at all");
  const Spans where = spans_of(spans, total, pool.heads);
  const auto rows_of = [&](nb::handle x, const char* name) -> const std::uint16_t* {
    if (x.is_none()) return nullptr;
    const Array rows(x, name);
    expect_shape(rows, {total, heads, d});
    return halves(rows, total * heads * d);
  };
  const Rows rows{q.strips().data, q.strips().stride,   static_cast<std::byte*>(out.data()), q.dtype(), rows_of(k, "k"),
                  rows_of(v, "v"), std::int64_t(total), int(q.elements() / q.inner())};
  perform([=, &kernels, &fmt] { kernels.engine().attend(fmt, layer, pool, exact, where, rows); });
}

}  // namespace

void bind_pages(nb::class_<Kernels>& kernels) {
  using namespace nb::literals;
  kernels.def("seal", seal, "fmt"_a, "layer"_a, "pages"_a, "page_ids"_a, "starts"_a, "k"_a, "v"_a, "head_start"_a = 0)
      .def("requantize", requantize, "fmt"_a, "layer"_a, "pages"_a, "spans"_a, "k"_a, "v"_a, "head_start"_a = 0)
      .def("install", install)
      .def("export", export_pages)
      .def("read", read)
      .def("attend", attend, "fmt"_a, "layer"_a, "pages"_a, "open_k"_a, "open_v"_a, "spans"_a, "q"_a, "out"_a,
           "k"_a.none(), "v"_a.none(), "head_start"_a = 0);
}

}  // namespace hack
