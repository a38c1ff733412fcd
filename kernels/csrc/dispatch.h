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

}  // namespace hack
