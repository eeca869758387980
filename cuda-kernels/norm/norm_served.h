// Which norms a line of a routing table serves.
#pragma once

#include "norm_kind.h"

enum class Of { BOTH, LAYER, RMS };

constexpr bool serves(Of of, Norm norm) {
  return of == Of::BOTH || of == (norm == Norm::LAYER ? Of::LAYER : Of::RMS);
}
