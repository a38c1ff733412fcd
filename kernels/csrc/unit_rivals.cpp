#include "rivals.h"

namespace hack {

const Operations& bf16_rival() {
  static constexpr Operations operations{"bf16", nullptr, nullptr, nullptr, attend_bf16, merge<V512>};
  return operations;
}

const Operations& dequantize_rival() {
  static constexpr Operations operations{"dequantize", nullptr, nullptr, nullptr, attend_dequantizing, merge<V512>};
  return operations;
}

}  // namespace hack
