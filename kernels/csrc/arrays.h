// Tensors of torch as the kernels take them: borrowed for one call, with every dtype, shape and stride checked.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "page_format.h"
#include "rowwise_calls.h"

namespace hack {

namespace nb = nanobind;

// Raise std::invalid_argument.
[[noreturn]] void refuse(const std::string& what);
[[noreturn]] void refuse(const char* name, const std::string& what);

enum class Type { kByte, kShort, kInt, kLong, kUnsignedLong, kFloat, kHalf, kBfloat, kBool };

Type type_of(nb::handle dtype, const char* name);
Type type_of(Element element);
Dtype float_dtype(Type type, const char* name);
std::int64_t bytes_of(Type type);

std::vector<std::size_t> shape_of(nb::handle tensor);
std::string in_words(const std::vector<std::size_t>& shape);

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

void expect_shape(const Array& array, const std::vector<std::size_t>& expected);

// The elements of an array, which must be `count` of the given kind.
template <class T>
T* elements(const Array& array, Type type, std::size_t count) {
  if (array.type() != type) refuse(array.name(), "has the wrong dtype");
  if (array.size() != count)
    refuse(array.name(), "has " + std::to_string(array.size()) + " elements; expected " + std::to_string(count));
  return static_cast<T*>(array.data());
}

inline const std::int64_t* integers(const Array& array, std::size_t count) {
  return elements<const std::int64_t>(array, Type::kLong, count);
}

inline const std::uint16_t* halves(const Array& array, std::size_t count) {
  return elements<const std::uint16_t>(array, Type::kHalf, count);
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

}  // namespace hack
