#include "level_pages.h"
#include "simd/amx.h"

namespace hack {

const Operations& amx_operations() {
  static const Operations operations = [] {
    Operations all = avx512_bf16_operations();
    all.pages[int(Kind::kLevels)] = level_operations<Amx>();
    return all;
  }();
  return operations;
}

}  // namespace hack
