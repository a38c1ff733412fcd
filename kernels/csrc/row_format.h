// Pages of FP16 rows (Kind::kRows): `k` and `v`, each [Π, D].
#pragma once

#include "page_format.h"

namespace hack {

struct RowFormat : PageFormat {
  constexpr RowFormat(int head_dim, int page_tokens) : PageFormat(Kind::kRows, head_dim, page_tokens) {
    add({"k", Element::kHalf, elements()});
    add({"v", Element::kHalf, elements()});
  }
};

}  // namespace hack
