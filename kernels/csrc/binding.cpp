// The Python module hack_kernels._cpu: arrays to pointers, with every length checked, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention.h"
#include "chooser.h"
#include "dispatch.h"
#include "float_format.h"
#include "group_format.h"
#include "hack_format.h"
#include "huffman_format.h"
#include "level_format.h"
#include "nuq_format.h"
#include "mix64.h"
#include "row_format.h"
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

Window make_window(int sink, int recent) {
  if (sink < 0 || recent < 0 || sink + recent > kMostExact) refuse("the window has more pages than a kernel takes");
  return {sink, recent};
}

enum class Type { kByte, kShort, kInt, kLong, kUnsignedLong, kFloat, kHalf, kBfloat, kBool };

// The dtypes of torch in the order of Type. Tensors are read through their methods, in a tenth of DLPack's time.
Type type_of(nb::handle dtype, const char* name) {
  static const std::vector<PyObject*> dtypes = [] {
    const nb::module_ torch = nb::module_::import_("torch");
    std::vector<PyObject*> found;
    for (const char* word : {"uint8", "int16", "int32", "int64", "uint64", "float32", "float16", "bfloat16", "bool"})
      found.push_back(nb::object(torch.attr(word)).release().ptr());  // dtypes are immortal
    return found;
  }();
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    if (dtype.ptr() == dtypes[i]) return Type(i);
  refuse(name, "has a dtype that no kernel takes");
}

Type type_of(Element element) {
  switch (element) {
    case Element::kByte: return Type::kByte;
    case Element::kShort: return Type::kShort;
    case Element::kFloat: return Type::kFloat;
    default: return Type::kHalf;
  }
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
    type_ = type_of(tensor.attr("dtype"), name);
  }

  const char* name() const { return name_; }
  void* data() const { return data_; }
  std::size_t size() const { return size_; }
  Type type() const { return type_; }
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
  Type type_;
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
T* elements(const Array& array, Type type, std::size_t count) {
  if (array.type() != type) refuse(array.name(), "has the wrong dtype");
  if (array.size() != count)
    refuse(array.name(), "has " + std::to_string(array.size()) + " elements; expected " + std::to_string(count));
  return static_cast<T*>(array.data());
}

const std::int64_t* integers(const Array& array, std::size_t count) {
  return elements<const std::int64_t>(array, Type::kLong, count);
}

const std::uint16_t* halves(const Array& array, std::size_t count) {
  return elements<const std::uint16_t>(array, Type::kHalf, count);
}

Dtype float_dtype(Type type, const char* name) {
  switch (type) {
    case Type::kFloat: return Dtype::kFloat;
    case Type::kHalf: return Dtype::kHalf;
    case Type::kBfloat: return Dtype::kBfloat;
    default: refuse(name, "must be float32, float16 or bfloat16");
  }
}

std::int64_t bytes_of(Type type) {
  switch (type) {
    case Type::kByte:
    case Type::kBool: return 1;
    case Type::kShort:
    case Type::kHalf:
    case Type::kBfloat: return 2;
    case Type::kInt:
    case Type::kFloat: return 4;
    default: return 8;
  }
}

// A CPU tensor [rows, ...] whose elements are contiguous within each row, as a slice of a larger tensor has them.
class StridedArray {
 public:
  StridedArray(nb::handle tensor, const char* name) : name_(name), type_(type_of(tensor.attr("dtype"), name)) {
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
    strips_ = {reinterpret_cast<std::byte*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")())),
               nb::cast<std::int64_t>(shape[0]), nb::cast<std::int64_t>(strides[0]) * bytes_of(type_)};
  }

  const char* name() const { return name_; }
  Type type() const { return type_; }
  const Strips& strips() const { return strips_; }
  std::int64_t elements() const { return elements_; }  // of a row
  std::int64_t inner() const { return inner_; }        // size of the last dimension

 private:
  const char* name_;
  Type type_;
  Strips strips_;
  std::int64_t elements_ = 1;
  std::int64_t inner_ = 1;
};

// Rows of floating-point numbers.
class RowArray : public StridedArray {
 public:
  RowArray(nb::handle tensor, const char* name) : StridedArray(tensor, name), dtype_(float_dtype(type(), name)) {}

  Dtype dtype() const { return dtype_; }
  void expect(const RowArray& like, std::int64_t elements_of_row) const {
    if (dtype_ != like.dtype_ || strips().count != like.strips().count || elements() != elements_of_row)
      refuse(name(), "has the wrong shape or dtype" + (&like == this ? "" : std::string(" for ") + like.name()));
  }

 private:
  Dtype dtype_;
};

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

// A weight [outputs, k] as codes.
BlockWeight codes_of(nb::handle tensor, std::int64_t outputs, std::int64_t k) {
  const Array weight(tensor, "weight");
  const std::int64_t blocks = k / kBlockColumns, tiles = (outputs + kLanes - 1) / kLanes;
  const int bits = weight.shape(2) == std::size_t(block_bytes(4)) ? 4 : 8;
  expect_shape(weight, {std::size_t(tiles), std::size_t(blocks), std::size_t(block_bytes(bits))});
  if (weight.type() != Type::kByte) refuse("weight must be uint8");
  if (k % kBlockColumns) refuse("weight has the wrong shape for x");
  return {static_cast<const std::byte*>(weight.data()), bits, int(blocks), int(outputs)};
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

  void seal(const PageFormat& fmt, int layer, const nb::dict& pages, nb::handle ids, nb::handle starts, nb::handle k,
            nb::handle v, int head_start) const {
    const Pool pool = pool_of(fmt, pages, head_start);
    const PageList list = page_list(pool, Array(ids, "page_ids"));
    const std::size_t rows = std::size_t(list.count) * pool.heads * fmt.elements();
    const auto* first = integers(Array(starts, "starts"), std::size_t(list.count));
    const auto *k_rows = halves(Array(k, "k"), rows), *v_rows = halves(Array(v, "v"), rows);
    const nb::gil_scoped_release unlocked;
    engine_.seal(fmt, layer, pool, list, first, k_rows, v_rows);
  }

  // spans as in `attend`.
  void requantize(const PageFormat& fmt, int layer, const nb::dict& pages, const nb::tuple& spans, nb::handle k,
                  nb::handle v, int head_start) const {
    const Pool pool = pool_of(fmt, pages, head_start);
    const Array keys(k, "k"), values(v, "v");
    const std::size_t total = keys.shape(0), heads = std::size_t(pool.heads), d = std::size_t(fmt.head_dim);
    expect_shape(keys, {total, heads, d});
    expect_shape(values, {total, heads, d});
    const Spans where = spans_of(spans, total, 1);
    const auto *k_rows = halves(keys, keys.size()), *v_rows = halves(values, values.size());
    const nb::gil_scoped_release unlocked;
    engine_.requantize(fmt, layer, pool, where, std::int64_t(total), k_rows, v_rows);
  }

  void install(const PageFormat& fmt, const nb::dict& pages, nb::handle ids, const nb::dict& wire) const {
    const Pool pool = pool_of(fmt, pages, 0);
    const PageList list = page_list(pool, Array(ids, "page_ids"));
    const Planes from = planes_of_dict(fmt, wire, std::size_t(list.count) * pool.heads, false);
    ConstPlanes read;
    for (int i = 0; i < fmt.plane_count; ++i) read.at[i] = from.at[i];
    const nb::gil_scoped_release unlocked;
    engine_.install(fmt, pool, list, read);
  }

  void export_pages(const PageFormat& fmt, const nb::dict& pages, nb::handle ids, const nb::dict& wire) const {
    const Pool pool = pool_of(fmt, pages, 0);
    const PageList list = page_list(pool, Array(ids, "page_ids"));
    const Planes to = planes_of_dict(fmt, wire, std::size_t(list.count) * pool.heads, true);
    const nb::gil_scoped_release unlocked;
    engine_.export_pages(fmt, pool, list, to);
  }

  // Pages as rows k, v [P, heads, Π, D] in FP16.
  void read(const PageFormat& fmt, const nb::dict& pages, nb::handle ids, nb::handle k, nb::handle v,
            int head_start) const {
    const Pool pool = pool_of(fmt, pages, head_start);
    const PageList list = page_list(pool, Array(ids, "page_ids"));
    const std::size_t rows = std::size_t(list.count) * pool.heads * fmt.elements();
    auto* k_rows = elements<std::uint16_t>(Array(k, "k"), Type::kHalf, rows);
    auto* v_rows = elements<std::uint16_t>(Array(v, "v"), Type::kHalf, rows);
    const nb::gil_scoped_release unlocked;
    engine_.read(fmt, pool, list, k_rows, v_rows);
  }

  // spans: (starts, counts, offsets, table, slots); k and v are None in decode. Tokens of q may lie apart.
  void attend(const PageFormat& fmt, int layer, const nb::dict& pages, nb::handle open_k, nb::handle open_v,
              const nb::tuple& spans, nb::handle queries, nb::handle output, nb::handle k, nb::handle v,
              int head_start) const {
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
    const Rows rows{
        q.strips().data, q.strips().stride,   static_cast<std::byte*>(out.data()), q.dtype(), rows_of(k, "k"),
        rows_of(v, "v"), std::int64_t(total), int(q.elements() / q.inner())};
    const nb::gil_scoped_release unlocked;
    engine_.attend(fmt, layer, pool, exact, where, rows);
  }

  // Row b of k, v [B, heads, D], number starts[b] of its sequence, to its place in slot slots[b]; false where one is
  // not finite in FP16.
  bool append(nb::handle open_k, nb::handle open_v, nb::handle starts, nb::handle slots, nb::handle k, nb::handle v,
              int sink, int recent) const {
    const Array keys(open_k, "open_k"), values(open_v, "open_v");
    if (keys.ndim() != 4 || keys.size() == 0) refuse("open_k has four dimensions, none of them 0");
    expect_shape(values, keys.shape());
    const RowArray k_rows(k, "k"), v_rows(v, "v");
    const std::size_t batch = std::size_t(k_rows.strips().count), heads = keys.shape(1), d = keys.shape(3);
    k_rows.expect(k_rows, std::int64_t(heads * d));
    v_rows.expect(k_rows, std::int64_t(heads * d));
    const Window window = make_window(sink, recent);
    if (keys.shape(2) % std::size_t(window.pages()) != 0) refuse("open_k has other pages than the window");
    const OpenRows open{elements<std::uint16_t>(keys, Type::kHalf, keys.size()),
                        elements<std::uint16_t>(values, Type::kHalf, keys.size()),
                        integers(Array(starts, "starts"), batch),
                        integers(Array(slots, "slots"), batch),
                        int(heads),
                        int(keys.shape(2)) / window.pages(),
                        int(d),
                        window};
    for (std::size_t b = 0; b < batch; ++b)
      if (open.slots[b] < 0 || open.slots[b] >= std::int64_t(keys.shape(0)) || open.positions[b] < 0)
        refuse("sequence " + std::to_string(b) + " has a bad position or a slot outside the pool");
    const nb::gil_scoped_release unlocked;
    return hack::append(rows_of(k_rows), open, k_rows.strips(), v_rows.strips());
  }

  // Rows of k, v [T, H, D] in FP16, zeros where one is not finite, which sets its sequence in faulty [B].
  void narrow(nb::handle k, nb::handle v, nb::handle counts, nb::handle faulty, nb::handle out_k,
              nb::handle out_v) const {
    const RowArray k_rows(k, "k"), v_rows(v, "v");
    v_rows.expect(k_rows, k_rows.elements());
    const Array sequences(counts, "counts"), to_k(out_k, "out_k"), to_v(out_v, "out_v");
    const std::size_t rows = std::size_t(k_rows.strips().count), size = rows * std::size_t(k_rows.elements());
    const std::int64_t* each = integers(sequences, sequences.size());
    std::size_t covered = 0;
    for (std::size_t b = 0; b < sequences.size(); ++b) {
      if (each[b] < 0) refuse("counts has a negative number");
      covered += std::size_t(each[b]);
    }
    if (covered != rows) refuse("counts cover " + std::to_string(covered) + " rows; k has " + std::to_string(rows));
    auto* flags = elements<bool>(Array(faulty, "faulty"), Type::kBool, sequences.size());
    auto* narrow_k = elements<std::uint16_t>(to_k, Type::kHalf, size);
    auto* narrow_v = elements<std::uint16_t>(to_v, Type::kHalf, size);
    const nb::gil_scoped_release unlocked;
    hack::narrow(rows_of(k_rows), engine_.threads, k_rows.strips(), v_rows.strips(), int(k_rows.elements()), each,
                 std::int64_t(sequences.size()), narrow_k, narrow_v, flags);
  }

  // The first `heads` heads of rows of x [T, H, D] by turns [T, D], in place.
  void rotate(nb::handle x, int heads, nb::handle turns) const {
    const RowArray rows(x, "x");
    const std::size_t d = std::size_t(rows.inner()), count = std::size_t(rows.strips().count);
    const auto* angles = elements<const float>(Array(turns, "turns"), Type::kFloat, count * d);
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
    if (float_dtype(weights.type(), "weight") != rows.dtype() || std::int64_t(weights.size()) != rows.elements())
      refuse("weight has the wrong shape or dtype for x");
    const nb::gil_scoped_release unlocked;
    hack::norm(rows_of(rows), engine_.threads, rows.strips(), added, static_cast<const std::byte*>(weights.data()),
               int(rows.elements()), epsilon, to.strips());
  }

  // silu(gate) * up: rows of x [T, 2 n], which are gate [n] and then up [n], to out [T, n].
  void gate(nb::handle x, nb::handle out) const {
    const RowArray rows(x, "x"), to(out, "out");
    if (rows.elements() % 2) refuse("x has an odd number of columns");
    const std::int64_t n = rows.elements() / 2;
    to.expect(rows, n);
    const nb::gil_scoped_release unlocked;
    hack::gate(rows_of(rows), engine_.threads, rows.strips(), int(n), std::size_t(n) * bytes_of(rows.dtype()),
               to.strips());
  }

  // Rows of x [T, k] times rows of weight [n, k], plus bias [n] unless it is None, to out [T, n].
  void product(nb::handle x, nb::handle weight, nb::handle bias, nb::handle out) const {
    const RowArray rows(x, "x"), to(out, "out");
    const Array weights(weight, "weight");
    const std::int64_t k = rows.elements(), n = to.elements();
    to.expect(rows, n);
    expect_shape(weights, {std::size_t(n), std::size_t(k)});
    if (float_dtype(weights.type(), "weight") != rows.dtype()) refuse("weight has the wrong dtype for x");
    const std::byte* added = nullptr;
    if (!bias.is_none()) added = elements<const std::byte>(Array(bias, "bias"), weights.type(), std::size_t(n));
    const nb::gil_scoped_release unlocked;
    hack::product(rows_of(rows), engine_.threads, rows.strips(), int(k), static_cast<const std::byte*>(weights.data()),
                  added, n, to.strips());
  }

  // As `product`, of a weight as codes (block_weight.py): [tiles, blocks, bytes].
  void block_product(nb::handle x, nb::handle weight, nb::handle bias, nb::handle out) const {
    const RowArray rows(x, "x"), to(out, "out");
    const BlockWeight codes = codes_of(weight, to.elements(), rows.elements());
    to.expect(rows, codes.outputs);
    const std::byte* added = nullptr;
    if (!bias.is_none()) {
      const Array more(bias, "bias");
      if (float_dtype(more.type(), "bias") != rows.dtype()) refuse("bias has the wrong dtype for x");
      added = elements<const std::byte>(more, more.type(), std::size_t(codes.outputs));
    }
    const nb::gil_scoped_release unlocked;
    if (rows.strips().count > 0) hack::product(rows_of(rows), engine_.threads, rows.strips(), codes, added, to.strips());
  }

  // Rows `ids` of a weight of `count` rows, or all of them where that is None, to out [rows, k].
  void unpack(nb::handle weight, std::int64_t count, nb::handle ids, nb::handle out) const {
    const RowArray to(out, "out");
    const BlockWeight codes = codes_of(weight, count, to.elements());
    const std::int64_t rows = to.strips().count;
    const std::int64_t* chosen = nullptr;
    if (!ids.is_none()) {
      chosen = integers(Array(ids, "ids"), std::size_t(rows));
      for (std::int64_t i = 0; i < rows; ++i)
        if (chosen[i] < 0 || chosen[i] >= count) refuse("ids lie outside the weight");
    } else if (rows != count) {
      refuse("out has the wrong shape for weight");
    }
    const nb::gil_scoped_release unlocked;
    if (rows > 0) hack::unpack(rows_of(to), engine_.threads, codes, chosen, to.strips());
  }

  // Heads of rows x [T, H, D], float32, by matrices [G, D, D], plus shift [G, D] unless it is None, to out [T, H, D].
  void turn_heads(nb::handle x, nb::handle matrices, nb::handle shift, nb::handle out) const {
    const RowArray rows(x, "x"), to(out, "out");
    const Array turns(matrices, "matrices");
    if (rows.dtype() != Dtype::kFloat) refuse("x must be float32");
    to.expect(rows, rows.elements());
    const std::size_t d = std::size_t(rows.inner()), heads = std::size_t(rows.elements()) / d, groups = turns.shape(0);
    expect_shape(turns, {groups, d, d});
    if (groups == 0 || heads % groups) refuse("matrices do not divide the heads of x");
    const auto* gains = elements<const float>(turns, Type::kFloat, groups * d * d);
    const float* added = nullptr;
    if (!shift.is_none()) added = elements<const float>(Array(shift, "shift"), Type::kFloat, groups * d);
    const nb::gil_scoped_release unlocked;
    hack::turn_heads(rows_of(rows), engine_.threads, rows.strips(), int(heads), int(d), gains, added, int(groups),
                     to.strips());
  }

  // The next id of each row of logits [B, n], or why there is none, with one chooser a row.
  std::vector<std::int64_t> choose(nb::handle logits, const nb::sequence& choosers, nb::handle faulty,
                                   nb::handle allowed) const {
    const RowArray rows(logits, "logits");
    const std::size_t batch = std::size_t(rows.strips().count);
    std::vector<const Chooser*> each;
    for (const nb::handle chooser : choosers) {
      const Chooser* made = nullptr;
      if (!nb::try_cast(chooser, made) || made == nullptr)
        refuse("choosers[" + std::to_string(each.size()) + "] was not made by these kernels");
      each.push_back(made);
    }
    if (each.size() != batch)
      refuse("choosers are " + std::to_string(each.size()) + "; logits have " + std::to_string(batch) + " rows");
    const Choices choices{rows.strips(), ids_of(rows), each.data(), flags_of(faulty, batch), words_of(allowed, rows)};
    std::vector<std::int64_t> ids(batch);
    {
      const nb::gil_scoped_release unlocked;
      hack::choose(rows_of(rows), engine_.threads, choices, ids.data());
    }
    return ids;
  }

  // Of each row of logits [B, n]: the log-probability of its id, and its most probable ids with theirs.
  nb::list score(nb::handle logits, const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& tops) const {
    const RowArray rows(logits, "logits");
    const int n = ids_of(rows);
    const std::size_t batch = std::size_t(rows.strips().count);
    if (ids.size() != batch || tops.size() != batch) refuse("ids and tops need one number for each row of logits");
    for (std::size_t row = 0; row < batch; ++row) {
      if (ids[row] < 0 || ids[row] >= n) refuse("ids[" + std::to_string(row) + "] lies outside the vocabulary");
      if (tops[row] < 0) refuse("tops[" + std::to_string(row) + "] is negative");
    }
    std::vector<Scores> found;
    {
      const nb::gil_scoped_release unlocked;
      found = hack::score(rows_of(rows), engine_.threads, rows.strips(), n, ids, tops);
    }
    nb::list scores;
    for (const Scores& each : found) scores.append(nb::make_tuple(each.of_id, nb::cast(each.best)));
    return scores;
  }

 private:
  static int ids_of(const RowArray& logits) {
    if (logits.elements() > kMostIds)
      refuse("logits have " + std::to_string(logits.elements()) + " columns; at most " + std::to_string(kMostIds) +
             " can be weighed");
    return int(logits.elements());
  }

  static const bool* flags_of(nb::handle faulty, std::size_t batch) {
    return faulty.is_none() ? nullptr : elements<const bool>(Array(faulty, "faulty"), Type::kBool, batch);
  }

  static const std::uint32_t* words_of(nb::handle allowed, const RowArray& logits) {
    if (allowed.is_none()) return nullptr;
    const Array words(allowed, "allowed");
    const std::size_t each = std::size_t(logits.elements() + kChoiceBlock - 1) / kChoiceBlock;
    expect_shape(words, {std::size_t(logits.strips().count), each});
    return elements<const std::uint32_t>(words, Type::kInt, words.size());
  }

  const RowOperations& rows_of(const RowArray& rows) const { return engine_.operations.rows[int(rows.dtype())]; }

  // `heads`: how many lists of pages a sequence may have, beside one for all heads.
  static Spans spans_of(const nb::tuple& spans, std::size_t rows, int heads) {
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

  Engine engine_;
};

HackFormat make_hack_format(int head_dim, int page_tokens, int k_bits, int v_bits, int k_partition, bool stochastic,
                            bool asymmetric, bool stored_sums, bool own_k_codes, bool own_v_codes, std::uint64_t seed) {
  if (!is_width(k_bits) || !is_width(v_bits)) refuse("codes have a width that no kernel takes");
  return HackFormat({head_dim, page_tokens, k_bits, v_bits, k_partition, stochastic, asymmetric, stored_sums,
                     own_k_codes, own_v_codes, seed});
}

// `gains` [heads, D/8, D, 8] in the order of level_format.h, and `weights` [heads, D], outlive the format. Both or
// neither is None.
LevelFormat make_level_format(int head_dim, int page_tokens, int k_bits, int v_bits, int sink, int recent,
                              nb::handle gains, nb::handle weights) {
  if (!is_level_width(k_bits) || !is_level_width(v_bits)) refuse("levels have a width that no kernel takes");
  const Window window = make_window(sink, recent);
  if (gains.is_none()) return LevelFormat(head_dim, page_tokens, k_bits, v_bits, window, {}, 0);
  const Array each_gain(gains, "gains"), each_weight(weights, "weights");
  const std::size_t d = std::size_t(head_dim), heads = each_gain.shape(0);
  expect_shape(each_gain, {heads, d / kGainBlock, d, kGainBlock});
  expect_shape(each_weight, {heads, d});
  const Feedback feedback{elements<const float>(each_gain, Type::kFloat, heads * d * d),
                          elements<const float>(each_weight, Type::kFloat, heads * d)};
  return LevelFormat(head_dim, page_tokens, k_bits, v_bits, window, feedback, std::int64_t(heads));
}

// The shapes that kernels which read pages value by value take.
void check_read_shape(int head_dim, int page_tokens) {
  if (head_dim < 1 || head_dim > kMaxHeadDim || head_dim % 32) refuse("head_dim is not a multiple of 32 up to 256");
  if (page_tokens < 1 || page_tokens > kMaxPageTokens || page_tokens % 32)
    refuse("page_tokens is not a multiple of 32 up to 128");
}

// `scaling` is a number of Scaling; `block` channels share a scale.
FloatFormat make_float_format(int head_dim, int page_tokens, int exponent_bits, int mantissa_bits, float largest,
                              int scaling, int block) {
  check_read_shape(head_dim, page_tokens);
  const SmallFloat element{exponent_bits, mantissa_bits, largest};
  constexpr std::pair<int, int> known[] = {{4, 3}, {3, 2}, {2, 3}, {2, 1}};
  if (std::find(std::begin(known), std::end(known), std::pair(exponent_bits, mantissa_bits)) == std::end(known))
    refuse("elements have bits of exponent and mantissa that no kernel takes");
  if (scaling < 0 || scaling > int(Scaling::kTwofold)) refuse("scaling is unknown");
  if (scaling != int(Scaling::kPage) && block != 16 && block != 32) refuse("blocks have 16 or 32 channels");
  return FloatFormat(head_dim, page_tokens, element, Scaling(scaling), block);
}

// (bits, by_channel, group, centre), as Grouped has them.
using GroupWords = std::tuple<int, bool, int, int>;

Grouped make_grouped(const GroupWords& words, int head_dim, int page_tokens) {
  const auto [bits, by_channel, group, centre] = words;
  const bool known = bits == 2 || bits == 4 || (bits == 5 && !by_channel);
  if (!known) refuse("groups have a width that no kernel takes");
  const int along = by_channel ? page_tokens : head_dim;
  const bool whole_row = !by_channel && group == head_dim;
  if (group < kLanes || along % group || (!whole_row && (group & (group - 1))))
    refuse("groups are a power of two, at least 16, that divides the page or the row");
  if (centre != 0 && (by_channel || !whole_row || 2 * centre >= 1 << bits)) refuse("centred codes have a scale a row");
  return {bits, by_channel, group, centre};
}

GroupFormat make_group_format(int head_dim, int page_tokens, const GroupWords& k, const GroupWords& v) {
  check_read_shape(head_dim, page_tokens);
  return GroupFormat(head_dim, page_tokens, make_grouped(k, head_dim, page_tokens),
                     make_grouped(v, head_dim, page_tokens));
}

NuqSide make_nuq_side(int bits, bool by_channel, bool ranged, const std::vector<float>& poles) {
  if (bits < 2 || bits > 4) refuse("codes have a width that no kernel takes");
  if (poles.size() != std::size_t(1) << bits) refuse("poles are as many as codes");
  NuqSide side{bits, by_channel, ranged, {}};
  std::copy(poles.begin(), poles.end(), side.poles);
  return side;
}

// `k_range` [2, heads, D], `row_turns` [Π, D] and `frequencies` [D/2] outlive the format. All or none are None.
NuqFormat make_nuq_format(int head_dim, int page_tokens, int k_bits, int v_bits, const std::vector<float>& k_poles,
                          const std::vector<float>& v_poles, nb::handle k_range, nb::handle row_turns,
                          nb::handle frequencies) {
  check_read_shape(head_dim, page_tokens);
  const NuqSide k = make_nuq_side(k_bits, true, k_range.is_none(), k_poles);
  const NuqSide v = make_nuq_side(v_bits, false, true, v_poles);
  if (k_range.is_none()) return NuqFormat(head_dim, page_tokens, k, v, {}, 0);
  const Array range(k_range, "k_range"), turns(row_turns, "row_turns"), steps(frequencies, "frequencies");
  const std::size_t d = std::size_t(head_dim), pi = std::size_t(page_tokens), heads = range.size() / (2 * d);
  expect_shape(range, {2, heads, d});
  expect_shape(turns, {pi, d});
  expect_shape(steps, {d / 2});
  const NuqTables tables{elements<const float>(range, Type::kFloat, 2 * heads * d),
                         elements<const float>(turns, Type::kFloat, pi * d),
                         elements<const float>(steps, Type::kFloat, d / 2)};
  return NuqFormat(head_dim, page_tokens, k, v, tables, std::int64_t(heads));
}

// (unit, bits of room, rungs, codes [books, symbols], lookup [books, 2^12]), as HuffmanSide has them.
using HuffmanWords = std::tuple<int, std::int64_t, std::vector<float>, nb::object, nb::object>;

HuffmanSide make_huffman_side(const HuffmanWords& words) {
  const auto& [unit, room, rungs, codes, lookup] = words;
  if (unit < 0 || unit > int(Unit::kToken)) refuse("the unit is unknown");
  if (rungs.empty() || rungs.size() > kMostRungs) refuse("rungs are too many");
  const Array each_code(codes, "codes"), each_entry(lookup, "lookup");
  const std::size_t books = each_code.shape(0), symbols = each_code.shape(1);
  if (symbols < 2 || symbols > kMostSymbols) refuse("codes", "are of an alphabet that no kernel takes");
  expect_shape(each_entry, {books, std::size_t(1) << kLookupBits});
  HuffmanSide side{Unit(unit), int(symbols), int(books), room, int(rungs.size()), {},
                   elements<const std::int32_t>(each_code, Type::kInt, books * symbols),
                   integers(each_entry, books << kLookupBits)};
  std::copy(rungs.begin(), rungs.end(), side.rungs);
  return side;
}

// The tensors of `k` and `v` outlive the format.
HuffmanFormat make_huffman_format(int head_dim, int page_tokens, const HuffmanWords& k, const HuffmanWords& v) {
  check_read_shape(head_dim, page_tokens);
  const std::int64_t values = std::int64_t(head_dim) * page_tokens;
  for (const HuffmanWords* words : {&k, &v})
    if (std::get<1>(*words) < 2 * values || std::get<1>(*words) > 8 * values) refuse("room is 2 to 8 bits a code");
  return HuffmanFormat(head_dim, page_tokens, make_huffman_side(k), make_huffman_side(v));
}

// `rules` is a ChoiceRules of choosing.py, which has checked it.
Chooser make_chooser(nb::handle rules, const std::vector<std::int64_t>& prompt) {
  const auto number = [&](const char* name) { return nb::cast<double>(rules.attr(name)); };
  ChoiceRules made{};
  made.seed = nb::cast<std::uint64_t>(rules.attr("seed"));
  made.temperature = number("temperature");
  made.top_p = number("top_p");
  made.top_k = nb::cast<std::int64_t>(rules.attr("top_k"));
  made.min_p = number("min_p");
  made.presence = number("presence");
  made.frequency = number("frequency");
  made.repetition = number("repetition");
  made.bias = nb::cast<decltype(made.bias)>(rules.attr("bias"));
  made.barred = nb::cast<decltype(made.barred)>(rules.attr("barred"));
  made.barred_until = nb::cast<std::int64_t>(rules.attr("barred_until"));
  for (const std::int64_t id : prompt)
    if (id < 0) refuse("prompt_ids has a negative id");
  return Chooser(std::move(made), prompt);
}

void append_token(Chooser& chooser, std::int64_t token_id) {
  if (token_id < 0) refuse("token_id is negative");
  chooser.append(token_id);
}

// Of contiguous bytes, in any object that offers a buffer.
std::uint64_t mix64_of(nb::handle data, std::uint64_t seed) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  std::uint64_t sum;
  {
    nb::gil_scoped_release others;
    sum = mix64(static_cast<const std::uint8_t*>(view.buf), std::size_t(view.len), seed);
  }
  PyBuffer_Release(&view);
  return sum;
}

// A table of operations from another extension, built from the same sources: how the lab's rivals get at the engine.
Kernels kernels_of(const nb::capsule& table, int threads) {
  if (std::string_view(table.name()) != HACK_OPERATIONS) refuse("the operations were built from other sources");
  return Kernels(*static_cast<const Operations*>(table.data()), threads);
}

}  // namespace

NB_MODULE(_cpu, m) {
  nb::set_leak_warnings(false);  // kernels live as long as their process, whose heap is frozen and not torn down
  using namespace nb::literals;
  m.doc() = "C++ kernels of the CPU backend; hack_kernels.cpu is their API.";
  m.attr("SOURCES") = HACK_SOURCES;
  m.def("supported_isas", supported_isas);
  m.def("mix64", mix64_of, "data"_a, "seed"_a);
  nb::class_<PageFormat>(m, "PageFormat");
  nb::class_<HackFormat, PageFormat>(m, "HackFormat");
  nb::class_<RowFormat, PageFormat>(m, "RowFormat");
  nb::class_<LevelFormat, PageFormat>(m, "LevelFormat");
  nb::class_<FloatFormat, PageFormat>(m, "FloatFormat");
  nb::class_<GroupFormat, PageFormat>(m, "GroupFormat");
  nb::class_<NuqFormat, PageFormat>(m, "NuqFormat");
  nb::class_<HuffmanFormat, PageFormat>(m, "HuffmanFormat");
  m.def("float_format", make_float_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "exponent_bits"_a,
        "mantissa_bits"_a, "largest"_a, "scaling"_a, "block"_a);
  m.def("group_format", make_group_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k"_a, "v"_a);
  m.def("nuq_format", make_nuq_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k_bits"_a, "v_bits"_a,
        "k_poles"_a, "v_poles"_a, "k_range"_a.none(), "row_turns"_a.none(), "frequencies"_a.none(),
        nb::keep_alive<0, 7>(), nb::keep_alive<0, 8>(), nb::keep_alive<0, 9>());
  m.def("huffman_format", make_huffman_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k"_a, "v"_a,
        nb::keep_alive<0, 3>(), nb::keep_alive<0, 4>());
  m.def("level_format", make_level_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k_bits"_a, "v_bits"_a,
        "sink"_a, "recent"_a, "gains"_a.none(), "weights"_a.none(), nb::keep_alive<0, 7>(), nb::keep_alive<0, 8>());
  m.def("hack_format", make_hack_format, nb::kw_only(), "head_dim"_a, "page_tokens"_a, "k_bits"_a, "v_bits"_a,
        "k_partition"_a, "stochastic"_a, "asymmetric"_a, "stored_sums"_a, "own_k_codes"_a, "own_v_codes"_a, "seed"_a);
  m.def(
      "row_format", [](int head_dim, int page_tokens) { return RowFormat(head_dim, page_tokens); }, nb::kw_only(),
      "head_dim"_a, "page_tokens"_a);
  m.def(
      "kernels", [](const std::string& isa, int threads) { return Kernels(operations_for(isa), threads); }, "isa"_a,
      "threads"_a);
  m.def("kernels_of", kernels_of, "table"_a, "threads"_a);
  nb::class_<Chooser>(m, "Chooser").def("append", append_token, "token_id"_a);
  m.def("chooser", make_chooser, "rules"_a, "prompt_ids"_a);
  nb::class_<Kernels>(m, "Kernels")
      .def_prop_ro("isa", &Kernels::isa)
      .def_prop_rw("threads", &Kernels::threads, &Kernels::set_threads)
      .def("seal", &Kernels::seal, "fmt"_a, "layer"_a, "pages"_a, "page_ids"_a, "starts"_a, "k"_a, "v"_a,
           "head_start"_a = 0)
      .def("requantize", &Kernels::requantize, "fmt"_a, "layer"_a, "pages"_a, "spans"_a, "k"_a, "v"_a,
           "head_start"_a = 0)
      .def("install", &Kernels::install)
      .def("export", &Kernels::export_pages)
      .def("read", &Kernels::read)
      .def("append", &Kernels::append)
      .def("narrow", &Kernels::narrow)
      .def("rotate", &Kernels::rotate)
      .def("norm", &Kernels::norm, "x"_a, "more"_a.none(), "weight"_a, "epsilon"_a, "out"_a)
      .def("gate", &Kernels::gate)
      .def("product", &Kernels::product, "x"_a, "weight"_a, "bias"_a.none(), "out"_a)
      .def("block_product", &Kernels::block_product, "x"_a, "weight"_a, "bias"_a.none(), "out"_a)
      .def("unpack", &Kernels::unpack, "weight"_a, "count"_a, "ids"_a.none(), "out"_a)
      .def("turn_heads", &Kernels::turn_heads, "x"_a, "matrices"_a, "shift"_a.none(), "out"_a)
      .def("choose", &Kernels::choose, "logits"_a, "choosers"_a, "faulty"_a.none(), "allowed"_a.none())
      .def("score", &Kernels::score)
      .def("attend", &Kernels::attend, "fmt"_a, "layer"_a, "pages"_a, "open_k"_a, "open_v"_a, "spans"_a, "q"_a, "out"_a,
           "k"_a.none(), "v"_a.none(), "head_start"_a = 0);
}

}  // namespace hack
