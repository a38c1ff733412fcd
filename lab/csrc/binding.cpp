// The Python module lab._rivals: tables of operations for the engine of
// hack_kernels._cpu, and measurements of the machine's limits.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "hack_format.h"
#include "machine_limits.h"

namespace nb = nanobind;

namespace hack {
namespace {

const Operations& rival_for(const std::string& name) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
    for (const Operations* rival : {&bf16_rival(), &dequantize_rival()})
      if (rival->name == name) return *rival;
  }
#endif
  throw std::invalid_argument("no rival '" + name + "' on this processor; bf16 and dequantize need AVX-512 BF16");
}

Dots* dots_for(const std::string& isa) {
  if (isa == "portable") return dots_portable;
#if defined(__x86_64__)
  if (isa == "avx2") return dots_avx2;
  if (isa.starts_with("avx512")) return dots_avx512;
#endif
  throw std::invalid_argument("no integer dots for '" + isa + "'");
}

}  // namespace

NB_MODULE(_rivals, m) {
  using namespace nb::literals;
  m.doc() =
      "What the kernels of the CPU backend are measured against; "
      "lab.rivals is its API.";
  m.attr("SOURCES") = HACK_LAB_SOURCES;
  m.attr("PRODUCTS_PER_ROUND") = kDotsPerRound * kVectorBytes;
  m.def("rival", [](const std::string& name) { return nb::capsule(&rival_for(name), HACK_OPERATIONS); }, "name"_a);
  // `words` uint64 at an address, a multiple of 2^17 of them.
  m.def(
      "read_all",
      [](std::uintptr_t address, std::size_t words, int threads) {
        const nb::gil_scoped_release unlocked;
        return read_all(reinterpret_cast<const std::uint64_t*>(address), words, threads);
      },
      "address"_a, "words"_a, "threads"_a);
  // `isa` is one that the processor runs.
  m.def(
      "dots",
      [](const std::string& isa, std::int64_t rounds, int threads) {
        Dots* const dots = dots_for(isa);
        const nb::gil_scoped_release unlocked;
        dots_on_all(dots, rounds, threads);
      },
      "isa"_a, "rounds"_a, "threads"_a);
}

}  // namespace hack
