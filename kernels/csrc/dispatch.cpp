#include "dispatch.h"

#include <stdexcept>

namespace hack {
namespace {

struct Candidate {
  const Operations& (*operations)();
  bool (*runs)();
};

#if defined(__x86_64__)
bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

bool runs_bf16() {
  return runs_avx512() && __builtin_cpu_supports("avx512bf16");
}

bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

constexpr Candidate kCandidates[] = {
#if defined(__x86_64__)
    {avx512_operations, runs_avx512},
    {avx2_operations, runs_avx2},
#endif
    {portable_operations, [] { return true; }},
};

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : kCandidates)
    if (candidate.runs()) names.emplace_back(candidate.operations().name);
  return names;
}

const Operations& operations_for(const std::string& isa) {
  for (const Candidate& candidate : kCandidates)
    if (candidate.runs() && candidate.operations().name == isa) return candidate.operations();
  std::string known;
  for (const std::string& name : supported_isas()) known += (known.empty() ? "" : ", ") + name;
  throw std::invalid_argument("this processor or build does not run '" + isa + "'; it runs " + known);
}

Attend* rows_in_bfloat(const Operations& operations) {
#if defined(__x86_64__)
  if (&operations == &avx512_operations() && runs_bf16()) return bf16_rows();
#endif
  return operations.attend_rows;
}

const Operations& rival_for(const std::string& name) {
#if defined(__x86_64__)
  if (runs_bf16()) {
    for (const Operations* rival : {&bf16_rival(), &dequantize_rival()})
      if (rival->name == name) return *rival;
  }
#endif
  throw std::invalid_argument("no rival '" + name + "' on this processor; bf16 and dequantize need AVX-512 BF16");
}

}  // namespace hack
