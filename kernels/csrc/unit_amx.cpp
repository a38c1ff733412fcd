#include "amx_codes.h"
#include "amx_pairs.h"
#include "block_matrix.h"
#include "hack_pages.h"
#include "level_pages.h"
#include "matrix_product.h"
#include "rows.h"
#include "simd/amx.h"

namespace hack {

const Operations& amx_operations() {
  static const Operations operations = [] {
    Operations all = avx512_bf16_operations();
    all.rows[int(Dtype::kFloat)].block_product = block_matrix_product_of<Amx, Dtype::kFloat>;
    all.rows[int(Dtype::kHalf)].block_product = block_matrix_product_of<Amx, Dtype::kHalf>;
    all.rows[int(Dtype::kBfloat)].block_product = block_matrix_product_of<Amx, Dtype::kBfloat>;
    all.name = Amx::name;
    const auto prompts = [&](Kind kind, Attend* attend, auto scratch_bytes) {
      all.pages[int(kind)].attend = attend;
      all.pages[int(kind)].scratch_bytes = scratch_bytes;
    };
    prompts(Kind::kLevels, attend_levels<Amx, AmxCodes<true>, PairLanes<false>>,
            level_scratch_bytes<Amx, AmxCodes<true>, PairLanes<false>>);
    prompts(Kind::kHack, attend_codes<Amx, AmxCodes<false>, PairLanes<false>>,
            hack_scratch_bytes<Amx, AmxCodes<false>, PairLanes<false>>);
    prompts(Kind::kRows, attend_by_reading<Amx, RowPages<Amx>, PairLanes<true>>,
            rows_scratch_bytes<Amx, PairLanes<true>>);
    RowOperations& rows = all.rows[int(Dtype::kBfloat)];
    rows.pair_rows = pair_rows<Amx>;
    rows.product = paired_product_block<Amx>;
    return all;
  }();
  return operations;
}

}  // namespace hack
