#include "bf16.h"
#include "dot_product.h"

namespace hack {
namespace {

// With few rows, memory is the limit whatever the instruction.
void attend_rows_by_dtype(const PageFormat& fmt, const Pool& pool, const AttendItem& item, std::byte* scratch) {
  const bool many = item.tokens * item.group > RowPages<Avx512>::kRestingRows;
  if (item.dtype == Dtype::kBfloat && many && takes_bf16(fmt)) return attend_rows_in_bf16(fmt, pool, item, scratch);
  avx512_operations().pages[int(Kind::kRows)].attend(fmt, pool, item, scratch);
}

}  // namespace

const Operations& avx512_bf16_operations() {
  static const Operations operations = [] {
    Operations all = avx512_operations();
    all.name = "avx512-bf16";
    all.pages[int(Kind::kRows)].attend = attend_rows_by_dtype;
    all.rows[int(Dtype::kBfloat)].product = dot_product_block<Avx512>;
    return all;
  }();
  return operations;
}

}  // namespace hack
