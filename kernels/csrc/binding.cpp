// The Python module hack_kernels._cpu: arrays to pointers, with every length checked, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "attention.h"
#include "dispatch.h"
#include "machine_limits.h"
#include "rowwise_calls.h"

namespace nb = nanobind;

namespace hack {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(what);
}

[[noreturn]] void refuse(const char* name, const std::string& what) {
  refuse(std::string(name) + " " + what);
}

enum class Kind { kByte, kShort, kLong, kUnsignedLong, kFloat, kHalf, kBfloat };

// The dtypes of torch in the order of Kind. Tensors are read through their methods, in a tenth of DLPack's time.
Kind kind_of(nb::handle dtype, const char* name) {
  static const std::vector<PyObject*> dtypes = [] {
    const nb::module_ torch = nb::module_::import_("torch");
    std::vector<PyObject*> found;
    for (const char* word : {"uint8", "int16", "int64", "uint64", "float32", "float16", "bfloat16"})
      found.push_back(nb::object(torch.attr(word)).release().ptr());  // dtypes are immortal
    return found;
  }();
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    if (dtype.ptr() == dtypes[i]) return Kind(i);
  refuse(name, "has a dtype that no kernel takes");
}

std::vector<std::size_t> shape_of(nb::handle tensor) {
  return nb::cast<std::vector<std::size_t>>(tensor.attr("shape"));
}

// A contiguous CPU tensor, borrowed for one call, and its name for errors.
class Array {
 public:
  Array(nb::handle tensor, const char* name) : tensor_(tensor), name_(name) {
    if (!nb::cast<bool>(tensor.attr("is_cpu")) || !nb::cast<bool>(tensor.attr("is_contiguous")()))
      refuse(name, "must be contiguous and on the CPU");
    data_ = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
    size_ = nb::cast<std::size_t>(tensor.attr("numel")());
    kind_ = kind_of(tensor.attr("dtype"), name);
  }

  const char* name() const { return name_; }
  void* data() const { return data_; }
  std::size_t size() const { return size_; }
  Kind kind() const { return kind_; }
  std::size_t ndim() const { return nb::len(nb::object(tensor_.attr("shape"))); }
  std::vector<std::size_t> shape() const { return shape_of(tensor_); }
  std::size_t shape(int axis) const {
    const nb::tuple sizes(tensor_.attr("shape"));
    if (std::size_t(axis) >= sizes.size()) refuse(name_, "has too few dimensions");
    return nb::cast<std::size_t>(sizes[axis]);
  }

 private:
  nb::handle tensor_;
  const char* name_;
  void* data_;
  std::size_t size_;
  Kind kind_;
};

std::string in_words(const std::vector<std::size_t>& shape) {
  std::string words;
  for (const std::size_t size : shape) words += (words.empty() ? "(" : ", ") + std::to_string(size);
  return words + ")";
}

void expect_shape(const Array& array, const std::vector<std::size_t>& expected) {
  if (const auto shape = array.shape(); shape != expected)
    refuse(array.name(), "is " + in_words(shape) + "; expected " + in_words(expected));
}

// The elements of an array, which must be `count` of the given kind.
template <class T>
T* elements(const Array& array, Kind kind, std::size_t count) {
  if (array.kind() != kind) refuse(array.name(), "has the wrong dtype");
  if (array.size() != count)
    refuse(array.name(), "has " + std::to_string(array.size()) + " elements; expected " + std::to_string(count));
  return static_cast<T*>(array.data());
}

const std::int64_t* integers(const Array& array, std::size_t count) {
  return elements<const std::int64_t>(array, Kind::kLong, count);
}

const std::uint16_t* halves(const Array& array, std::size_t count) {
  return elements<const std::uint16_t>(array, Kind::kHalf, count);
}

Dtype float_dtype(Kind kind, const char* name) {
  switch (kind) {
    case Kind::kFloat: return Dtype::kFloat;
    case Kind::kHalf: return Dtype::kHalf;
    case Kind::kBfloat: return Dtype::kBfloat;
    default: refuse(name, "must be float32, float16 or bfloat16");
  }
}

// A CPU tensor [rows, ...] whose elements are contiguous within each row, as a slice of a larger tensor has them.
class RowArray {
 public:
  RowArray(nb::handle tensor, const char* name) : name_(name) {
    const nb::tuple shape(tensor.attr("shape")), strides(tensor.attr("stride")());
    const int axes = int(nb::len(shape));
    if (!nb::cast<bool>(tensor.attr("is_cpu")) || axes < 2)
      refuse(name, "must be on the CPU and have two dimensions or more");
    for (int axis = axes - 1; axis > 0; --axis) {
      const auto size = nb::cast<std::int64_t>(shape[axis]);
      if (size != 1 && nb::cast<std::int64_t>(strides[axis]) != elements_)
        refuse(name, "must be contiguous within each row");
      elements_ *= size;
      inner_ = axis == axes - 1 ? size : inner_;
    }
    if (elements_ < 1) refuse(name, "has empty rows");
    dtype_ = float_dtype(kind_of(tensor.attr("dtype"), name), name);
    strips_ = {reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")())),
               nb::cast<std::int64_t>(shape[0]), nb::cast<std::int64_t>(strides[0]) * bytes_of(dtype_)};
  }

  const Strips& strips() const { return strips_; }
  Dtype dtype() const { return dtype_; }
  std::int64_t elements() const { return elements_; }  // of a row
  std::int64_t inner() const { return inner_; }        // size of the last dimension
  void expect(const RowArray& like, std::int64_t elements) const {
    if (dtype_ != like.dtype_ || strips_.count != like.strips_.count || elements_ != elements)
      refuse(name_, "has the wrong shape or dtype" + (&like == this ? "" : std::string(" for ") + like.name_));
  }

 private:
  const char* name_;
  Strips strips_;
  Dtype dtype_;
  std::int64_t elements_ = 1;
  std::int64_t inner_ = 1;
};

// Planes of `pages` pages of one head, by name. Sums are looked up where the format keeps them and `sums` says so.
Page planes_of_dict(const Format& fmt, const nb::dict& planes, std::size_t pages, bool sums) {
  const auto get = [&](const char* name) {
    if (!planes.contains(name)) refuse(std::string("plane ") + name + " is missing");
    return Array(planes[name], name);
  };
  const auto bytes = [&](const char* name, std::size_t count) {
    return elements<std::uint8_t>(get(name), Kind::kByte, pages * count);
  };
  const auto meta = [&](const char* name, std::size_t count) -> std::uint16_t* {
    if (!fmt.coded()) return nullptr;
    return elements<std::uint16_t>(get(name), Kind::kHalf, pages * count);
  };
  const auto sum = [&](const char* name, std::size_t count, int width) -> std::uint8_t* {
    if (!fmt.sums_at_rest() || !sums) return nullptr;
    if (width == 1) return bytes(name, count);
    return reinterpret_cast<std::uint8_t*>(elements<std::int16_t>(get(name), Kind::kShort, pages * count));
  };
  return {bytes("k_codes", fmt.k_code_bytes()), meta("k_min", fmt.k_meta()),
          meta("k_scale", fmt.k_meta()),        sum("k_sums", fmt.k_meta(), fmt.k_sum_bytes()),
          bytes("v_codes", fmt.v_code_bytes()), meta("v_min", fmt.v_meta()),
          meta("v_scale", fmt.v_meta()),        sum("v_sums", fmt.v_meta(), fmt.v_sum_bytes())};
}

Pool pool_of(const Format& fmt, const nb::dict& planes) {
  if (!planes.contains("k_codes")) refuse("plane k_codes is missing");
  const Array codes(planes["k_codes"], "k_codes");
  if (codes.ndim() != 4) refuse("k_codes of a pool has four dimensions");
  return {planes_of_dict(fmt, planes, codes.shape(0) * codes.shape(1), true), std::int64_t(codes.shape(0)),
          int(codes.shape(1))};
}

PageList page_list(const Pool& pool, const Array& ids) {
  const PageList list{integers(ids, ids.size()), std::int64_t(ids.size())};
  for (std::int64_t i = 0; i < list.count; ++i)
    if (list.ids[i] < 0 || list.ids[i] >= pool.pages) refuse("page_ids lie outside the pool");
  return list;
}

class Kernels {
 public:
  Kernels(const Operations& operations, int threads) : engine_{operations, rows_in_bfloat(operations), 1} {
    set_threads(threads);
  }

  std::string isa() const { return std::string(engine_.operations.name); }
  int threads() const { return engine_.threads; }
  void set_threads(int threads) {
    if (threads < 1) refuse("threads must be at least 1");
    engine_.threads = threads;
  }

  void seal(const Format& fmt, int layer, const nb::dict& pages, nb::handle ids, nb::handle starts, nb::handle k,
            nb::handle v) const {
    const Pool pool = pool_of(fmt, pages);
    const PageList list = page_list(pool, Array(ids, "page_ids"));
    const std::size_t rows = std::size_t(list.count) * pool.heads * fmt.elements();
    const auto* first = integers(Array(starts, "starts"), std::size_t(list.count));
    const auto *k_rows = halves(Array(k, "k"), rows), *v_rows = halves(Array(v, "v"), rows);
    const nb::gil_scoped_release unlocked;
    engine_.seal(fmt, layer, pool, list, first, k_rows, v_rows);
  }

  // spans as in `attend`.
  void requantize(const Format& fmt, int layer, const nb::dict& pages, const nb::tuple& spans, nb::handle k,
                  nb::handle v) const {
    const Pool pool = pool_of(fmt, pages);
    const Array keys(k, "k"), values(v, "v");
    const std::size_t total = keys.shape(0), heads = std::size_t(pool.heads), d = std::size_t(fmt.head_dim);
    expect_shape(keys, {total, heads, d});
    expect_shape(values, {total, heads, d});
    const Spans where = spans_of(spans, total);
    const auto *k_rows = halves(keys, keys.size()), *v_rows = halves(values, values.size());
    const nb::gil_scoped_release unlocked;
    engine_.requantize(fmt, layer, pool, where, std::int64_t(total), k_rows, v_rows);
  }

  void install(const Format& fmt, const nb::dict& pages, nb::handle ids, const nb::dict& wire) const {
    const Pool pool = pool_of(fmt, pages);
    const PageList list = page_list(pool, Array(ids, "page_ids"));
    const Page from = planes_of_dict(fmt, wire, std::size_t(list.count) * pool.heads, wire.contains("k_sums"));
    const nb::gil_scoped_release unlocked;
    engine_.install(
        fmt, pool, list,
        {from.k_codes, from.k_min, from.k_scale, from.k_sums, from.v_codes, from.v_min, from.v_scale, from.v_sums});
  }

  void export_pages(const Format& fmt, const nb::dict& pages, nb::handle ids, const nb::dict& wire) const {
    const Pool pool = pool_of(fmt, pages);
    const PageList list = page_list(pool, Array(ids, "page_ids"));
    const Page to = planes_of_dict(fmt, wire, std::size_t(list.count) * pool.heads, true);
    const nb::gil_scoped_release unlocked;
    engine_.export_pages(fmt, pool, list, to);
  }

  // spans: (starts, counts, offsets, table, slots); k and v are None in decode. Tokens of q may lie apart.
  void attend(const Format& fmt, int layer, const nb::dict& pages, nb::handle open_k, nb::handle open_v,
              const nb::tuple& spans, nb::handle queries, nb::handle output, nb::handle k, nb::handle v) const {
    const Pool pool = pool_of(fmt, pages);
    const Array keys(open_k, "open_k"), values(open_v, "open_v"), out(output, "out");
    const RowArray q(queries, "q");
    const std::size_t heads = std::size_t(pool.heads), d = std::size_t(fmt.head_dim), slots = keys.shape(0);
    for (const Array* array : {&keys, &values}) expect_shape(*array, {slots, heads, std::size_t(fmt.page_tokens), d});
    const OpenPages open{halves(keys, keys.size()), halves(values, keys.size()), std::int64_t(slots)};
    if (q.inner() != std::int64_t(d) || q.elements() % std::int64_t(heads * d))
      refuse("q is " + in_words(shape_of(queries)) + "; expected [T, a multiple of " + std::to_string(heads) +
             " heads, " + std::to_string(d) + "]");
    const std::size_t total = std::size_t(q.strips().count);
    if (out.size() != total * std::size_t(q.elements()) || float_dtype(out.kind(), "out") != q.dtype())
      refuse("out must be like q");
    if (k.is_none() != v.is_none()) refuse("k and v are given together or not at all");
    const Spans where = spans_of(spans, total);
    const auto rows_of = [&](nb::handle x, const char* name) -> const std::uint16_t* {
      if (x.is_none()) return nullptr;
      const Array rows(x, name);
      expect_shape(rows, {total, heads, d});
      return halves(rows, total * heads * d);
    };
    const Rows rows{
        q.strips().data, q.strips().stride,   static_cast<std::byte*>(out.data()), q.dtype(), rows_of(k, "k"),
        rows_of(v, "v"), std::int64_t(total), int(q.elements() / q.inner())};
    const nb::gil_scoped_release unlocked;
    engine_.attend(fmt, layer, pool, open, where, rows);
  }

  // Row b of k, v [B, heads, D] to position starts[b] of open page slots[b]; false where one is not finite in FP16.
  bool append(nb::handle open_k, nb::handle open_v, nb::handle starts, nb::handle slots, nb::handle k,
              nb::handle v) const {
    const Array keys(open_k, "open_k"), values(open_v, "open_v");
    if (keys.ndim() != 4 || keys.size() == 0) refuse("open_k has four dimensions, none of them 0");
    expect_shape(values, keys.shape());
    const RowArray k_rows(k, "k"), v_rows(v, "v");
    const std::size_t batch = std::size_t(k_rows.strips().count), heads = keys.shape(1), d = keys.shape(3);
    k_rows.expect(k_rows, std::int64_t(heads * d));
    v_rows.expect(k_rows, std::int64_t(heads * d));
    const OpenRows open{elements<std::uint16_t>(keys, Kind::kHalf, keys.size()),
                        elements<std::uint16_t>(values, Kind::kHalf, keys.size()),
                        integers(Array(starts, "starts"), batch),
                        integers(Array(slots, "slots"), batch),
                        int(heads),
                        int(keys.shape(2)),
                        int(d)};
    for (std::size_t b = 0; b < batch; ++b)
      if (open.slots[b] < 0 || open.slots[b] >= std::int64_t(keys.shape(0)) || open.positions[b] < 0)
        refuse("sequence " + std::to_string(b) + " has a bad position or an open page outside the pool");
    const nb::gil_scoped_release unlocked;
    return hack::append(rows_of(k_rows), open, k_rows.strips(), v_rows.strips());
  }

  // The first `heads` heads of rows of x [T, H, D] by turns [T, D], in place.
  void rotate(nb::handle x, int heads, nb::handle turns) const {
    const RowArray rows(x, "x");
    const std::size_t d = std::size_t(rows.inner()), count = std::size_t(rows.strips().count);
    const auto* angles = elements<const float>(Array(turns, "turns"), Kind::kFloat, count * d);
    if (d % 2 || heads < 1 || heads > rows.elements() / rows.inner()) refuse("x lacks heads, or head_dim is odd");
    const nb::gil_scoped_release unlocked;
    hack::rotate(rows_of(rows), engine_.threads, rows.strips(), heads, int(d), angles);
  }

  // Rows of x [T, n], to which `more` [T, n] is added in place unless it is None, with weight [n], to out [T, n].
  void norm(nb::handle x, nb::handle more, nb::handle weight, float epsilon, nb::handle out) const {
    const RowArray rows(x, "x"), to(out, "out");
    Strips added{};
    if (!more.is_none()) {
      const RowArray terms(more, "more");
      terms.expect(rows, rows.elements());
      added = terms.strips();
    }
    const Array weights(weight, "weight");
    to.expect(rows, rows.elements());
    if (float_dtype(weights.kind(), "weight") != rows.dtype() || std::int64_t(weights.size()) != rows.elements())
      refuse("weight has the wrong shape or dtype for x");
    const nb::gil_scoped_release unlocked;
    hack::norm(rows_of(rows), engine_.threads, rows.strips(), added, static_cast<const std::byte*>(weights.data()),
               int(rows.elements()), epsilon, to.strips());
  }

  // Rows of x [T, 2 n], gates and then what they let through, to out [T, n].
  void gate(nb::handle x, nb::handle out) const {
    const RowArray rows(x, "x"), to(out, "out");
    if (rows.elements() % 2) refuse("x has an odd number of columns");
    const std::int64_t n = rows.elements() / 2;
    to.expect(rows, n);
    const nb::gil_scoped_release unlocked;
    hack::gate(rows_of(rows), engine_.threads, rows.strips(), int(n), std::size_t(n) * bytes_of(rows.dtype()),
               to.strips());
  }

  // Where each row of x [T, n] is largest, or -1.
  std::vector<std::int64_t> largest(nb::handle x) const {
    const RowArray rows(x, "x");
    std::vector<std::int64_t> at(std::size_t(rows.strips().count));
    const nb::gil_scoped_release unlocked;
    hack::largest(rows_of(rows), engine_.threads, rows.strips(), int(rows.elements()), at.data());
    return at;
  }

 private:
  const RowOperations& rows_of(const RowArray& rows) const { return engine_.operations.rows[int(rows.dtype())]; }

  static Spans spans_of(const nb::tuple& spans, std::size_t rows) {
    if (nb::len(spans) != 5) refuse("spans are (starts, counts, offsets, table, slots)");
    const Array starts(spans[0], "starts"), counts(spans[1], "counts"), offsets(spans[2], "offsets"),
        table(spans[3], "table"), slots(spans[4], "slots");
    if (table.ndim() != 2) refuse("table must have two dimensions");
    const std::size_t batch = starts.size(), width = table.shape(1);
    const auto* each = integers(counts, batch);
    std::int64_t covered = 0;
    for (std::size_t b = 0; b < batch; ++b) covered += each[b];
    if (covered != std::int64_t(rows))
      refuse("spans cover " + std::to_string(covered) + " rows; the batch has " + std::to_string(rows));
    return {.starts = integers(starts, batch),
            .counts = each,
            .offsets = integers(offsets, batch),
            .table = integers(table, batch * width),
            .slots = integers(slots, batch),
            .batch = std::int64_t(batch),
            .width = std::int64_t(width)};
  }

  Engine engine_;
};

Format make_format(int head_dim, int page_tokens, int k_bits, int v_bits, int k_partition, bool stochastic,
                   bool asymmetric, bool stored_sums, bool own_k_codes, bool own_v_codes, std::uint64_t seed) {
  return {head_dim,   page_tokens, k_bits,      v_bits,      k_partition, stochastic,
          asymmetric, stored_sums, own_k_codes, own_v_codes, seed};
}

}  // namespace

NB_MODULE(_cpu, m) {
  nb::set_leak_warnings(false);  // kernels live as long as their process, whose heap is frozen and not torn down
  using namespace nb::literals;
  m.doc() = "C++ kernels of the CPU backend; hack_kernels.cpu is their API.";
  m.attr("SOURCES") = HACK_SOURCES;
  m.def("supported_isas", supported_isas);
  m.def("read_all", [](nb::handle tensor, int threads) {
    const Array array(tensor, "words");
    const auto* words = elements<const std::uint64_t>(array, Kind::kUnsignedLong, array.size());
    const nb::gil_scoped_release unlocked;
    return read_all(words, array.size(), threads);
  });
  m.def("dots", [](const std::string& isa, std::int64_t rounds, int threads) {
    const Operations& operations = operations_for(isa);
    const nb::gil_scoped_release unlocked;
    dots_on_all(operations, rounds, threads);
  });
  m.attr("PRODUCTS_PER_ROUND") = kDotsPerRound * kVectorBytes;
  nb::class_<Format>(m, "Format");
  m.def("make_format", make_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k_bits"_a, "v_bits"_a,
        "k_partition"_a, "stochastic"_a, "asymmetric"_a, "stored_sums"_a, "own_k_codes"_a, "own_v_codes"_a, "seed"_a);
  m.def(
      "kernels", [](const std::string& isa, int threads) { return Kernels(operations_for(isa), threads); }, "isa"_a,
      "threads"_a);
  m.def(
      "rival", [](const std::string& name, int threads) { return Kernels(rival_for(name), threads); }, "name"_a,
      "threads"_a);
  nb::class_<Kernels>(m, "Kernels")
      .def_prop_ro("isa", &Kernels::isa)
      .def_prop_rw("threads", &Kernels::threads, &Kernels::set_threads)
      .def("seal", &Kernels::seal)
      .def("requantize", &Kernels::requantize)
      .def("install", &Kernels::install)
      .def("export", &Kernels::export_pages)
      .def("append", &Kernels::append)
      .def("rotate", &Kernels::rotate)
      .def("norm", &Kernels::norm, "x"_a, "more"_a.none(), "weight"_a, "epsilon"_a, "out"_a)
      .def("gate", &Kernels::gate)
      .def("largest", &Kernels::largest)
      .def("attend", &Kernels::attend, "fmt"_a, "layer"_a, "pages"_a, "open_k"_a, "open_v"_a, "spans"_a, "q"_a, "out"_a,
           "k"_a.none(), "v"_a.none());
}

}  // namespace hack
