#include "operations.h"
#include "simd/avx512.h"

namespace hack {

const Operations& avx512_operations() {
  static constexpr Operations operations = operations_of<Avx512>();
  return operations;
}

}  // namespace hack
