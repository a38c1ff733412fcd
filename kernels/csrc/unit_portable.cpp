#include "operations.h"
#include "simd/portable.h"

namespace hack {

const Operations& portable_operations() {
  static constexpr Operations operations = operations_of<Portable>();
  return operations;
}

}  // namespace hack
