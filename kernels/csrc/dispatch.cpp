#include "dispatch.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// Linux gives a process the tiles' state on request.
bool runs_amx() {
#if defined(__linux__)
  constexpr int request_permission = 0x1023, tile_data = 18;
  return runs_bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

constexpr Candidate kCandidates[] = {
#if defined(__x86_64__)
    {amx_operations, runs_amx},
    {avx512_bf16_operations, runs_bf16},
    {avx512_operations, runs_avx512},
    {avx2_operations, runs_avx2},
#endif
    {portable_operations, [] { return true; }},
};

}  // namespace

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.runs()) names.emplace_back(candidate.operations().name);
  }
  return names;
}

const Operations& operations_for(const std::string& isa) {
  for (const Candidate& candidate : kCandidates)
    if (candidate.runs() && candidate.operations().name == isa) return candidate.operations();
  std::string known;
  for (const std::string& name : supported_isas()) known += (known.empty() ? "" : ", ") + name;
  throw std::invalid_argument("this processor or build does not run '" + isa + "'; it runs " + known);
}

}  // namespace hack
