// The table of one instruction set S: a row for every kind of page.
#pragma once

#include "block_digits.h"
#include "block_dots.h"
#include "block_words.h"
#include "choose.h"
#include "delta_pages.h"
#include "float_pages.h"
#include "group_pages.h"
#include "hack_pages.h"
#include "head_turn.h"
#include "huffman_pages.h"
#include "key_bounds.h"
#include "level_pages.h"
#include "nuq_pages.h"
#include "rows.h"
#include "product.h"
#include "vote.h"

namespace hack {

// For units that multiply words: the rounding of rows of x, and their products with a weight's codes.
template <class S, Dtype dtype>
void round_for_tiles(const std::byte* row, int k, int bits, const BlockRows& out, std::int64_t at) {
  rounds_coarsely(dtype, bits) ? round_blocks<S, dtype>(row, k, bits, out, at) : round_words<S, dtype>(row, k, out, at);
}
template <class S, Dtype dtype>
void multiply_tiles(const BlockItem& item, std::byte* scratch) {
  if (item.bits == 8) return code_product<BlockWords<S, 8>, dtype>(item, scratch);
  if constexpr (rounds_coarsely(dtype, 4)) code_product<BlockDigits<S>, dtype>(item, scratch);
  else code_product<BlockWords<S, 4>, dtype>(item, scratch);
}

template <class S, Dtype dtype>
constexpr RowOperations row_operations_of() {
  constexpr bool words = S::kMultipliesWords;
  constexpr auto round = [] {
    if constexpr (words) return round_for_tiles<S, dtype>;
    else return round_blocks<S, dtype>;
  }();
  constexpr auto multiply = [] {
    if constexpr (words) return multiply_tiles<S, dtype>;
    else return multiply_dots<S, dtype>;
  }();
  return {round_row<S, dtype>,      rotate_row<S, dtype>, norm_row<S, dtype>, gate_row<S, dtype>,
          largest_in_row<S, dtype>, spread_row<S, dtype>, weigh<S>,           product_block<S, dtype>,
          widen_row<S, dtype>,      narrow_row<S, dtype>, turn_head<S, dtype>, round,
          multiply,                 unpack_row_of<S, dtype>};
}

template <class S>
constexpr Operations operations_of() {
  Operations all{S::name, {}, merge<S>, vote_row<S>, score_bounds<S>, {}};
  all.pages[int(Kind::kHack)] = hack_operations<S>();
  all.pages[int(Kind::kRows)] = rows_operations<S>();
  all.pages[int(Kind::kLevels)] = level_operations<S>();
  all.pages[int(Kind::kFloats)] = float_operations<S>();
  all.pages[int(Kind::kGroups)] = group_operations<S>();
  all.pages[int(Kind::kNuq)] = nuq_operations<S>();
  all.pages[int(Kind::kHuffman)] = huffman_operations<S>();
  all.pages[int(Kind::kDeltas)] = delta_operations<S>();
  all.rows[int(Dtype::kFloat)] = row_operations_of<S, Dtype::kFloat>();
  all.rows[int(Dtype::kHalf)] = row_operations_of<S, Dtype::kHalf>();
  all.rows[int(Dtype::kBfloat)] = row_operations_of<S, Dtype::kBfloat>();
  return all;
}

}  // namespace hack
