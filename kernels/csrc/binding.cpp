// The Python module hack_kernels._cpu: arrays to pointers, with every length checked, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "attention.h"
#include "dispatch.h"

namespace nb = nanobind;

namespace hack {
namespace {

using Array = nb::ndarray<nb::device::cpu, nb::c_contig>;
using nb::dlpack::dtype_code;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// The elements of an array, which must be `count` of the given kind.
template <class T>
T* elements(const Array& array, dtype_code code, std::size_t count, const char* name) {
  const auto type = array.dtype();
  if (type.code != std::uint8_t(code) || type.bits != 8 * sizeof(T) || type.lanes != 1)
    refuse(std::string(name) + " has the wrong dtype");
  if (array.size() != count)
    refuse(std::string(name) + " has " + std::to_string(array.size()) + " elements; expected " + std::to_string(count));
  return static_cast<T*>(array.data());
}

const std::int64_t* integers(const Array& array, std::size_t count, const char* name) {
  return elements<const std::int64_t>(array, dtype_code::Int, count, name);
}

const std::uint16_t* halves(const Array& array, std::size_t count, const char* name) {
  return elements<const std::uint16_t>(array, dtype_code::Float, count, name);
}

Dtype float_dtype(const Array& array) {
  const auto type = array.dtype();
  if (type.code == std::uint8_t(dtype_code::Float) && type.bits == 32) return Dtype::kFloat;
  if (type.code == std::uint8_t(dtype_code::Float) && type.bits == 16) return Dtype::kHalf;
  if (type.code == std::uint8_t(dtype_code::Bfloat) && type.bits == 16) return Dtype::kBfloat;
  refuse("q must be float32, float16 or bfloat16");
}

// Planes of `pages` pages of one head, by name. Sums are looked up where the format keeps them and `sums` says so.
Page planes_of_dict(const Format& fmt, const nb::dict& planes, std::size_t pages, bool sums) {
  const auto get = [&](const char* name) {
    if (!planes.contains(name)) refuse(std::string("plane ") + name + " is missing");
    return nb::cast<Array>(planes[name]);
  };
  const auto bytes = [&](const char* name, std::size_t count) {
    return elements<std::uint8_t>(get(name), dtype_code::UInt, pages * count, name);
  };
  const auto meta = [&](const char* name, std::size_t count) -> std::uint16_t* {
    if (!fmt.coded()) return nullptr;
    return elements<std::uint16_t>(get(name), dtype_code::Float, pages * count, name);
  };
  const auto sum = [&](const char* name, std::size_t count, int width) -> std::uint8_t* {
    if (!fmt.sums_at_rest() || !sums) return nullptr;
    if (width == 1) return bytes(name, count);
    return reinterpret_cast<std::uint8_t*>(
        elements<std::int16_t>(get(name), dtype_code::Int, pages * count, name));
  };
  return {bytes("k_codes", fmt.k_code_bytes()), meta("k_min", fmt.k_meta()), meta("k_scale", fmt.k_meta()),
          sum("k_sums", fmt.k_meta(), fmt.k_sum_bytes()), bytes("v_codes", fmt.v_code_bytes()),
          meta("v_min", fmt.v_meta()), meta("v_scale", fmt.v_meta()), sum("v_sums", fmt.v_meta(), fmt.v_sum_bytes())};
}

Pool pool_of(const Format& fmt, const nb::dict& planes) {
  if (!planes.contains("k_codes")) refuse("plane k_codes is missing");
  const Array codes = nb::cast<Array>(planes["k_codes"]);
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
  Kernels(const Operations& operations, int threads) : engine_{operations, 1} { set_threads(threads); }

  std::string isa() const { return std::string(engine_.operations.name); }
  int threads() const { return engine_.threads; }
  void set_threads(int threads) {
    if (threads < 1) refuse("threads must be at least 1");
    engine_.threads = threads;
  }

  void seal(const Format& fmt, int layer, const nb::dict& pages, const Array& ids, const Array& starts, const Array& k,
            const Array& v) const {
    const Pool pool = pool_of(fmt, pages);
    const PageList list = page_list(pool, ids);
    const std::size_t rows = std::size_t(list.count) * pool.heads * fmt.elements();
    const auto* first = integers(starts, ids.size(), "starts");
    const auto *k_rows = halves(k, rows, "k"), *v_rows = halves(v, rows, "v");
    const nb::gil_scoped_release unlocked;
    engine_.seal(fmt, layer, pool, list, first, k_rows, v_rows);
  }

  void install(const Format& fmt, const nb::dict& pages, const Array& ids, const nb::dict& wire) const {
    const Pool pool = pool_of(fmt, pages);
    const PageList list = page_list(pool, ids);
    const Page from = planes_of_dict(fmt, wire, std::size_t(list.count) * pool.heads, wire.contains("k_sums"));
    const nb::gil_scoped_release unlocked;
    engine_.install(fmt, pool, list,
                    {from.k_codes, from.k_min, from.k_scale, from.k_sums, from.v_codes, from.v_min, from.v_scale,
                     from.v_sums});
  }

  void export_pages(const Format& fmt, const nb::dict& pages, const Array& ids, const nb::dict& wire) const {
    const Pool pool = pool_of(fmt, pages);
    const PageList list = page_list(pool, ids);
    const Page to = planes_of_dict(fmt, wire, std::size_t(list.count) * pool.heads, true);
    const nb::gil_scoped_release unlocked;
    engine_.export_pages(fmt, pool, list, to);
  }

  // spans: (starts, counts, offsets, table, slots).
  void attend(const Format& fmt, int layer, const nb::dict& pages, const Array& open_k, const Array& open_v,
              const std::vector<Array>& spans, const Array& q, const Array& out, const std::optional<Array>& k,
              const std::optional<Array>& v) const {
    const Pool pool = pool_of(fmt, pages);
    const std::size_t page = std::size_t(pool.heads) * fmt.elements(), slots = open_k.size() / page;
    const OpenPages open{halves(open_k, slots * page, "open_k"), halves(open_v, slots * page, "open_v"),
                         std::int64_t(slots)};
    const Spans where = spans_of(spans);
    if (q.ndim() != 3 || q.shape(1) % std::size_t(pool.heads) || q.shape(2) != std::size_t(fmt.head_dim))
      refuse("q must be [T, a multiple of the KV heads, head_dim]");
    if (out.size() != q.size() || out.dtype() != q.dtype()) refuse("out must be like q");
    const std::size_t elements = q.shape(0) * pool.heads * fmt.head_dim;
    const Rows rows{static_cast<const std::byte*>(q.data()), static_cast<std::byte*>(out.data()), float_dtype(q),
                    k ? halves(*k, elements, "k") : nullptr, v ? halves(*v, elements, "v") : nullptr,
                    std::int64_t(q.shape(0)), int(q.shape(1))};
    const nb::gil_scoped_release unlocked;
    engine_.attend(fmt, layer, pool, open, where, rows);
  }

 private:
  static Spans spans_of(const std::vector<Array>& spans) {
    if (spans.size() != 5 || spans[3].ndim() != 2) refuse("spans are (starts, counts, offsets, table, slots)");
    const std::size_t batch = spans[0].size(), width = spans[3].shape(1);
    return {integers(spans[0], batch, "starts"),         integers(spans[1], batch, "counts"),
            integers(spans[2], batch, "offsets"),        integers(spans[3], batch * width, "table"),
            integers(spans[4], batch, "slots"),          std::int64_t(batch),
            std::int64_t(width)};
  }

  Engine engine_;
};

Format make_format(int head_dim, int page_tokens, int k_bits, int v_bits, int k_partition, bool stochastic,
                   bool asymmetric, bool stored_sums, bool own_k_codes, std::uint64_t seed) {
  return {head_dim, page_tokens, k_bits, v_bits, k_partition, stochastic, asymmetric, stored_sums, own_k_codes, seed};
}

}  // namespace

NB_MODULE(_cpu, m) {
  using namespace nb::literals;
  m.doc() = "C++ kernels of the CPU backend; hack_kernels.cpu is their API.";
  m.def("supported_isas", supported_isas);
  nb::class_<Format>(m, "Format");
  m.def("make_format", make_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k_bits"_a, "v_bits"_a,
        "k_partition"_a, "stochastic"_a, "asymmetric"_a, "stored_sums"_a, "own_k_codes"_a, "seed"_a);
  m.def("kernels", [](const std::string& isa, int threads) { return Kernels(operations_for(isa), threads); }, "isa"_a,
        "threads"_a);
  m.def("rival", [](const std::string& name, int threads) { return Kernels(rival_for(name), threads); }, "name"_a,
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
