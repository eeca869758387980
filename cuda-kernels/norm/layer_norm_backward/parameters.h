// The gradients of weight and bias alone, through layer_norm or rms_norm.
#pragma once

#include "norm/norm_args.h"

// dx is null, and one of dweight and dbias is not. weight and dadded are unused. M and N are not 0.
void norm_backward_parameters(const NormBackwardArgs& args);
