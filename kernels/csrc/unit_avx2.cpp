#include "operations.h"
#include "simd/avx2.h"

namespace hack {

const Operations& avx2_operations() {
  static constexpr Operations operations = operations_of<Avx2>();
  return operations;
}

}  // namespace hack
