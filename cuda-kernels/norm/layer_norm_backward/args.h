// The gradients of x, weight and bias through layer_norm.
#pragma once

#include "norm/norm_args.h"

using LayerNormBackwardArgs = NormBackwardArgs;

extern const StepTable<LayerNormBackwardArgs> layer_norm_backward_steps;
