#include "level_pages.h"
#include "matrix_product.h"
#include "simd/amx.h"

namespace hack {

const Operations& amx_operations() {
  static const Operations operations = [] {
    Operations all = avx512_bf16_operations();
    all.pages[int(Kind::kLevels)] = level_operations<Amx>();
    RowOperations& rows = all.rows[int(Dtype::kBfloat)];
    rows.pair_rows = pair_rows<Amx>;
    rows.product = paired_product_block<Amx>;
    return all;
  }();
  return operations;
}

}  // namespace hack
