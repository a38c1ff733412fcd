// Programs: the calls of a step, recorded once and made again without Python.
#include <nanobind/nanobind.h>

#include "bindings.h"

namespace hack {
namespace {
namespace bound {  // named like what they call

// Calls `work` and records all calls of kernels that this thread makes meanwhile. The program borrows their arguments:
// the caller keeps them alive.
Program record(const nb::callable& work) {
  if (recording != nullptr) refuse("this thread records already");
  Program program;
  struct Recording {
    explicit Recording(Program* program) { recording = program; }
    ~Recording() { recording = nullptr; }
  } taking_down(&program);
  work();
  return program;
}

void start(Stopwatch& stopwatch) {
  if (recording != nullptr) recording->add([&stopwatch] { stopwatch.start(); });
  stopwatch.start();
}

void stop(Stopwatch& stopwatch, const nb::args&) {
  if (recording != nullptr) recording->add([&stopwatch] { stopwatch.stop(); });
  stopwatch.stop();
}

}  // namespace bound
}  // namespace

void bind_programs(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Program>(m, "Program")
      .def("__call__", &Program::run, nb::call_guard<nb::gil_scoped_release>())
      .def("__len__", &Program::size);
  m.def("record", bound::record, "work"_a);
  nb::class_<Stopwatch>(m, "Stopwatch")
      .def(nb::init<>())
      .def_prop_ro("seconds", &Stopwatch::seconds)
      .def("__enter__", bound::start)
      .def("__exit__", bound::stop);
}

}  // namespace hack
