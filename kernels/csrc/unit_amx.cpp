#include "block_matrix.h"
#include "level_pages.h"
#include "matrix_product.h"
#include "simd/amx.h"

namespace hack {

const Operations& amx_operations() {
  static const Operations operations = [] {
    Operations all = avx512_bf16_operations();
    all.pages[int(Kind::kLevels)] = level_operations<Amx>();
    all.rows[int(Dtype::kFloat)].block_product = block_matrix_product_of<Amx, Dtype::kFloat>;
    all.rows[int(Dtype::kHalf)].block_product = block_matrix_product_of<Amx, Dtype::kHalf>;
    all.rows[int(Dtype::kBfloat)].block_product = block_matrix_product_of<Amx, Dtype::kBfloat>;
    RowOperations& rows = all.rows[int(Dtype::kBfloat)];
    rows.pair_rows = pair_rows<Amx>;
    rows.product = paired_product_block<Amx>;
    return all;
  }();
  return operations;
}

}  // namespace hack
