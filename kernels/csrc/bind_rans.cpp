// Wire form `rans`: arrays of bytes in, bytes out, without the interpreter's lock.
#include <nanobind/ndarray.h>

#include "arrays.h"
#include "bindings.h"
#include "rans.h"

namespace hack {
namespace {

using Coded = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Plane = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::object encode(const Coded& plane, std::size_t blocks, std::size_t row, std::size_t most) {
  if (blocks < 1 || row < 1 || blocks > kMostColumns || row > kMostColumns || blocks * row > kMostColumns)
    refuse("rans: blocks of rows have between 1 and " + std::to_string(kMostColumns) + " columns");
  if (plane.size() % (blocks * row) != 0) refuse("rans: the plane is no whole number of rows");
  if (plane.size() > UINT32_MAX) refuse("rans: the plane is too large");
  std::vector<std::uint8_t> coded;
  {
    const nb::gil_scoped_release unlocked;
    coded = rans_encode(plane.data(), plane.size(), {blocks, row}, most);
  }
  if (coded.empty()) return nb::none();
  return nb::bytes(coded.data(), coded.size());
}

void decode(const Coded& coded, const Plane& plane) {
  const nb::gil_scoped_release unlocked;
  rans_decode(coded.data(), coded.size(), plane.data(), plane.size());
}

}  // namespace

void bind_rans(nb::module_& m) {
  using namespace nb::literals;
  m.def("rans_encode", encode, "plane"_a, "blocks"_a, "row"_a, "most"_a);
  m.def("rans_decode", decode, "coded"_a, "plane"_a);
  m.attr("RANS_COLUMNS") = kMostColumns;
}

}  // namespace hack
