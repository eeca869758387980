// Which of the two norms a kernel is compiled for.
#pragma once

enum class Norm { LAYER, RMS };  // of rms_norm the mean is 0, and there is no bias
