#include "rivals.h"

namespace hack {

Attend* bf16_rows() {
  return attend_bf16_rows;
}

const Operations& bf16_rival() {
  static constexpr Operations operations{"bf16",  nullptr,     nullptr,     nullptr, nullptr,
                                         nullptr, attend_bf16, merge<V512>, nullptr, {}};
  return operations;
}

const Operations& dequantize_rival() {
  static constexpr Operations operations{"dequantize",        nullptr, nullptr,     nullptr, nullptr,
                                         attend_dequantizing, nullptr, merge<V512>, nullptr, {}};
  return operations;
}

}  // namespace hack
