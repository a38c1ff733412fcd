// The parts of the Python module hack_kernels._cpu, which binding.cpp puts together. They turn arrays into pointers and
// check every length, and do nothing else.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

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

// Recorded calls of kernels, in their order. `run` makes them again on the same memory.
class Program {
 public:
  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  std::size_t size() const { return calls_.size(); }
  void run() const {
    for (const auto& call : calls_) call();
  }

 private:
  std::vector<std::function<void()>> calls_;
};

// The program that records this thread's calls; null if none does.
inline thread_local Program* recording = nullptr;

// Makes a call whose arguments are checked, and records it if a program is being recorded.
template <class Call>
void perform(Call call) {
  if (recording != nullptr) recording->add(call);
  const nb::gil_scoped_release unlocked;
  call();
}

// Sums the time between start and stop. A program records both calls.
class Stopwatch {
 public:
  double seconds() const { return seconds_.load(std::memory_order_relaxed); }
  void start() { began_ = std::chrono::steady_clock::now(); }
  void stop() {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - began_;
    seconds_.store(seconds() + spent.count(), std::memory_order_relaxed);
  }

 private:
  std::chrono::steady_clock::time_point began_;
  std::atomic<double> seconds_{0};  // read by other threads
};

// The window of pages that a query sees exactly. Raises std::invalid_argument if a kernel does not take it.
Window make_window(int sink, int recent);

void bind_formats(nb::module_& m);
void bind_pages(nb::class_<Kernels>& kernels);
void bind_rows(nb::class_<Kernels>& kernels);
void bind_evictions(nb::class_<Kernels>& kernels);
void bind_choices(nb::module_& m, nb::class_<Kernels>& kernels);
void bind_programs(nb::module_& m);
void bind_rans(nb::module_& m);

}  // namespace hack
