// Which instruction sets this build has and this processor runs.
#pragma once

#include <string>
#include <vector>

#include "work.h"

namespace hack {

// Names that `operations_for` takes on this processor, fastest first.
std::vector<std::string> supported_isas();

// Raises std::invalid_argument naming what the processor or the build lacks.
const Operations& operations_for(const std::string& isa);

// What attends to FP16 rows for queries in bfloat16: BF16 products where the processor has them.
Attend* rows_in_bfloat(const Operations& operations);
// A rival of equal craft, for benchmarks: `bf16` or `dequantize`. Raises std::invalid_argument without AVX-512 BF16.
const Operations& rival_for(const std::string& name);

}  // namespace hack
