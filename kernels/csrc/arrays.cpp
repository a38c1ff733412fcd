#include "arrays.h"

#include <nanobind/stl/vector.h>

#include <stdexcept>

namespace hack {

void refuse(const std::string& what) {
  throw std::invalid_argument(what);
}

void refuse(const char* name, const std::string& what) {
  refuse(std::string(name) + " " + what);
}

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

std::string in_words(const std::vector<std::size_t>& shape) {
  std::string words;
  for (const std::size_t size : shape) words += (words.empty() ? "(" : ", ") + std::to_string(size);
  return words + ")";
}

void expect_shape(const Array& array, const std::vector<std::size_t>& expected) {
  if (const auto shape = array.shape(); shape != expected)
    refuse(array.name(), "is " + in_words(shape) + "; expected " + in_words(expected));
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

}  // namespace hack
