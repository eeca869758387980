// Which of the two norms a kernel is compiled for, and which ones a line of a routing table serves.
#pragma once

enum class Norm { LAYER, RMS };  // of rms_norm the mean is 0, and there is no bias
enum class Of { BOTH, LAYER, RMS };

// Whether a line for `of` serves `norm`.
constexpr bool serves(Of of, Norm norm) {
  return of == Of::BOTH || of == (norm == Norm::LAYER ? Of::LAYER : Of::RMS);
}
