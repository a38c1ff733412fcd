#include "rivals.h"

#include "tables.h"

namespace hack {
namespace {

// Attends to pages of one kind, with as much scratch memory and as many threads
// as the kind has without a rival.
Operations rival(std::string_view name, Kind kind, Attend* attend, std::int64_t alone_work) {
  Operations operations{name, {}, merge<V512>, nullptr, nullptr, {}};
  PageOperations& pages = operations.pages[int(kind)];
  pages.attend = attend;
  pages.scratch_bytes = rows_scratch_bytes<V512>;
  pages.alone_work = alone_work;
  return operations;
}

}  // namespace

const Operations& bf16_rival() {
  static const Operations operations = rival("bf16", Kind::kRows, attend_bf16, 24);
  return operations;
}

const Operations& dequantize_rival() {
  static const Operations operations = rival("dequantize", Kind::kHack, attend_dequantizing, 96);
  return operations;
}

}  // namespace hack
