// The parts of the Python module hack_kernels._cpu, which binding.cpp puts together: arrays to pointers, with every
// length checked, and nothing else.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "arrays.h"
#include "attention.h"

namespace hack {

// One instruction set's kernels and their threads.
class Kernels {
 public:
  Kernels(const Operations& operations, int threads) : engine_{operations, 1} { set_threads(threads); }

  const Engine& engine() const { return engine_; }
  const RowOperations& rows_of(const RowArray& rows) const { return engine_.operations.rows[int(rows.dtype())]; }
  std::string isa() const { return std::string(engine_.operations.name); }
  int threads() const { return engine_.threads; }
  void set_threads(int threads) {
    if (threads < 1) refuse("threads must be at least 1");
    engine_.threads = threads;
  }

 private:
  Engine engine_;
};

// Pages that a query sees exactly, as checked.
Window make_window(int sink, int recent);

void bind_formats(nb::module_& m);
void bind_pages(nb::class_<Kernels>& kernels);
void bind_rows(nb::class_<Kernels>& kernels);
void bind_choices(nb::module_& m, nb::class_<Kernels>& kernels);

}  // namespace hack
