// The Python module hack_kernels._cpu: arrays to pointers, with every length checked, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "attention.h"
#include "dispatch.h"
#include "limits.h"

namespace nb = nanobind;

namespace hack {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument(what);
}

enum class Kind { kByte, kShort, kLong, kUnsignedLong, kFloat, kHalf, kBfloat };

// The dtypes of torch in the order of Kind. Tensors are read through their methods, in a tenth of DLPack's time.
Kind kind_of(nb::handle dtype) {
  static const std::vector<PyObject*> dtypes = [] {
    const nb::module_ torch = nb::module_::import_("torch");
    std::vector<PyObject*> found;
    for (const char* name : {"uint8", "int16", "int64", "uint64", "float32", "float16", "bfloat16"})
      found.push_back(nb::object(torch.attr(name)).release().ptr());  // dtypes are immortal
    return found;
  }();
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    if (dtype.ptr() == dtypes[i]) return Kind(i);
  refuse("a tensor has a dtype that no kernel takes");
}

// A contiguous CPU tensor, borrowed for one call.
class Array {
 public:
  explicit Array(nb::handle tensor) : tensor_(tensor) {
    if (!nb::cast<bool>(tensor.attr("is_cpu")) || !nb::cast<bool>(tensor.attr("is_contiguous")()))
      refuse("tensors must be contiguous and on the CPU");
    data_ = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
    size_ = nb::cast<std::size_t>(tensor.attr("numel")());
    kind_ = kind_of(tensor.attr("dtype"));
  }

  void* data() const { return data_; }
  std::size_t size() const { return size_; }
  Kind kind() const { return kind_; }
  std::size_t ndim() const { return nb::len(nb::object(tensor_.attr("shape"))); }
  std::size_t shape(int axis) const { return nb::cast<std::size_t>(tensor_.attr("shape")[axis]); }

 private:
  nb::handle tensor_;
  void* data_;
  std::size_t size_;
  Kind kind_;
};

// The elements of an array, which must be `count` of the given kind.
template <class T>
T* elements(const Array& array, Kind kind, std::size_t count, const char* name) {
  if (array.kind() != kind) refuse(std::string(name) + " has the wrong dtype");
  if (array.size() != count)
    refuse(std::string(name) + " has " + std::to_string(array.size()) + " elements; expected " + std::to_string(count));
  return static_cast<T*>(array.data());
}

const std::int64_t* integers(const Array& array, std::size_t count, const char* name) {
  return elements<const std::int64_t>(array, Kind::kLong, count, name);
}

const std::uint16_t* halves(const Array& array, std::size_t count, const char* name) {
  return elements<const std::uint16_t>(array, Kind::kHalf, count, name);
}

Dtype float_dtype(const Array& array) {
  switch (array.kind()) {
    case Kind::kFloat: return Dtype::kFloat;
    case Kind::kHalf: return Dtype::kHalf;
    case Kind::kBfloat: return Dtype::kBfloat;
    default: refuse("q must be float32, float16 or bfloat16");
  }
}

// Planes of `pages` pages of one head, by name. Sums are looked up where the format keeps them and `sums` says so.
Page planes_of_dict(const Format& fmt, const nb::dict& planes, std::size_t pages, bool sums) {
  const auto get = [&](const char* name) {
    if (!planes.contains(name)) refuse(std::string("plane ") + name + " is missing");
    return Array(planes[name]);
  };
  const auto bytes = [&](const char* name, std::size_t count) {
    return elements<std::uint8_t>(get(name), Kind::kByte, pages * count, name);
  };
  const auto meta = [&](const char* name, std::size_t count) -> std::uint16_t* {
    if (!fmt.coded()) return nullptr;
    return elements<std::uint16_t>(get(name), Kind::kHalf, pages * count, name);
  };
  const auto sum = [&](const char* name, std::size_t count, int width) -> std::uint8_t* {
    if (!fmt.sums_at_rest() || !sums) return nullptr;
    if (width == 1) return bytes(name, count);
    return reinterpret_cast<std::uint8_t*>(elements<std::int16_t>(get(name), Kind::kShort, pages * count, name));
  };
  return {bytes("k_codes", fmt.k_code_bytes()), meta("k_min", fmt.k_meta()),
          meta("k_scale", fmt.k_meta()),        sum("k_sums", fmt.k_meta(), fmt.k_sum_bytes()),
          bytes("v_codes", fmt.v_code_bytes()), meta("v_min", fmt.v_meta()),
          meta("v_scale", fmt.v_meta()),        sum("v_sums", fmt.v_meta(), fmt.v_sum_bytes())};
}

Pool pool_of(const Format& fmt, const nb::dict& planes) {
  if (!planes.contains("k_codes")) refuse("plane k_codes is missing");
  const Array codes(planes["k_codes"]);
  if (codes.ndim() != 4) refuse("k_codes of a pool has four dimensions");
  return {planes_of_dict(fmt, planes, codes.shape(0) * codes.shape(1), true), std::int64_t(codes.shape(0)),
          int(codes.shape(1))};
}

PageList page_list(const Pool& pool, const Array& ids) {
  const PageList list{integers(ids, ids.size(), "page_ids"), std::int64_t(ids.size())};
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
    const PageList list = page_list(pool, Array(ids));
    const std::size_t rows = std::size_t(list.count) * pool.heads * fmt.elements();
    const auto* first = integers(Array(starts), std::size_t(list.count), "starts");
    const auto *k_rows = halves(Array(k), rows, "k"), *v_rows = halves(Array(v), rows, "v");
    const nb::gil_scoped_release unlocked;
    engine_.seal(fmt, layer, pool, list, first, k_rows, v_rows);
  }

  void install(const Format& fmt, const nb::dict& pages, nb::handle ids, const nb::dict& wire) const {
    const Pool pool = pool_of(fmt, pages);
    const PageList list = page_list(pool, Array(ids));
    const Page from = planes_of_dict(fmt, wire, std::size_t(list.count) * pool.heads, wire.contains("k_sums"));
    const nb::gil_scoped_release unlocked;
    engine_.install(
        fmt, pool, list,
        {from.k_codes, from.k_min, from.k_scale, from.k_sums, from.v_codes, from.v_min, from.v_scale, from.v_sums});
  }

  void export_pages(const Format& fmt, const nb::dict& pages, nb::handle ids, const nb::dict& wire) const {
    const Pool pool = pool_of(fmt, pages);
    const PageList list = page_list(pool, Array(ids));
    const Page to = planes_of_dict(fmt, wire, std::size_t(list.count) * pool.heads, true);
    const nb::gil_scoped_release unlocked;
    engine_.export_pages(fmt, pool, list, to);
  }

  // spans: (starts, counts, offsets, table, slots); k and v are None in decode.
  void attend(const Format& fmt, int layer, const nb::dict& pages, nb::handle open_k, nb::handle open_v,
              const nb::list& spans, nb::handle queries, nb::handle output, nb::handle k, nb::handle v) const {
    const Pool pool = pool_of(fmt, pages);
    const Array keys(open_k), values(open_v), q(queries), out(output);
    const std::size_t page = std::size_t(pool.heads) * fmt.elements(), slots = keys.size() / page;
    const OpenPages open{halves(keys, slots * page, "open_k"), halves(values, slots * page, "open_v"),
                         std::int64_t(slots)};
    const Spans where = spans_of(spans);
    if (q.ndim() != 3 || q.shape(1) % std::size_t(pool.heads) || q.shape(2) != std::size_t(fmt.head_dim))
      refuse("q must be [T, a multiple of the KV heads, head_dim]");
    if (out.size() != q.size() || out.kind() != q.kind()) refuse("out must be like q");
    const std::size_t total = q.shape(0), elements = total * pool.heads * fmt.head_dim;
    const auto rows_of = [&](nb::handle x, const char* name) {
      return x.is_none() ? nullptr : halves(Array(x), elements, name);
    };
    const Rows rows{static_cast<const std::byte*>(q.data()),
                    static_cast<std::byte*>(out.data()),
                    float_dtype(q),
                    rows_of(k, "k"),
                    rows_of(v, "v"),
                    std::int64_t(total),
                    int(q.shape(1))};
    const nb::gil_scoped_release unlocked;
    engine_.attend(fmt, layer, pool, open, where, rows);
  }

 private:
  static Spans spans_of(const nb::list& spans) {
    if (nb::len(spans) != 5) refuse("spans are (starts, counts, offsets, table, slots)");
    const Array starts(spans[0]), counts(spans[1]), offsets(spans[2]), table(spans[3]), slots(spans[4]);
    if (table.ndim() != 2) refuse("the table of pages has two dimensions");
    const std::size_t batch = starts.size(), width = table.shape(1);
    return {.starts = integers(starts, batch, "starts"),
            .counts = integers(counts, batch, "counts"),
            .offsets = integers(offsets, batch, "offsets"),
            .table = integers(table, batch * width, "table"),
            .slots = integers(slots, batch, "slots"),
            .batch = std::int64_t(batch),
            .width = std::int64_t(width)};
  }

  Engine engine_;
};

Format make_format(int head_dim, int page_tokens, int k_bits, int v_bits, int k_partition, bool stochastic,
                   bool asymmetric, bool stored_sums, bool own_k_codes, std::uint64_t seed) {
  return {head_dim, page_tokens, k_bits, v_bits, k_partition, stochastic, asymmetric, stored_sums, own_k_codes, seed};
}

}  // namespace

NB_MODULE(_cpu, m) {
  nb::set_leak_warnings(false);  // kernels live as long as their process, whose heap is frozen and not torn down
  using namespace nb::literals;
  m.doc() = "C++ kernels of the CPU backend; hack_kernels.cpu is their API.";
  m.attr("SOURCES") = HACK_SOURCES;
  m.def("supported_isas", supported_isas);
  m.def("read_all", [](nb::handle tensor, int threads) {
    const Array array(tensor);
    const auto* words = elements<const std::uint64_t>(array, Kind::kUnsignedLong, array.size(), "words");
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
        "k_partition"_a, "stochastic"_a, "asymmetric"_a, "stored_sums"_a, "own_k_codes"_a, "seed"_a);
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
      .def("install", &Kernels::install)
      .def("export", &Kernels::export_pages)
      .def("attend", &Kernels::attend, "fmt"_a, "layer"_a, "pages"_a, "open_k"_a, "open_v"_a, "spans"_a, "q"_a, "out"_a,
           "k"_a.none(), "v"_a.none());
}

}  // namespace hack
