// The gradients of x and weight through rms_norm.
#pragma once

#include "norm/norm_args.h"

using RmsNormBackwardArgs = NormBackwardArgs;

extern const StepTable<RmsNormBackwardArgs> rms_norm_backward_steps;
