// The Python module hack_kernels._cpu; hack_kernels.cpu is its API.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string_view>

#include "arrays.h"
#include "bindings.h"
#include "dispatch.h"

namespace hack {

Window make_window(int sink, int recent) {
  if (sink < 0 || recent < 0 || sink + recent > kMostExact) refuse("the window has more pages than a kernel takes");
  return {sink, recent};
}

namespace {

// Kernels on a table of operations from another extension built from the same sources, for the lab's rivals.
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
  m.def(
      "kernels", [](const std::string& isa, int threads) { return Kernels(operations_for(isa), threads); }, "isa"_a,
      "threads"_a);
  m.def("kernels_of", kernels_of, "table"_a, "threads"_a);
  nb::class_<Kernels> kernels(m, "Kernels");
  kernels.def_prop_ro("isa", &Kernels::isa).def_prop_rw("threads", &Kernels::threads, &Kernels::set_threads);
  bind_formats(m);
  bind_pages(kernels);
  bind_rows(kernels);
  bind_evictions(kernels);
  bind_choices(m, kernels);
  bind_programs(m);
  bind_rans(m);
}

}  // namespace hack
