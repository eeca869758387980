// out = (x - mean) * rstd * weight + bias over the rows of a matrix.
#pragma once

#include "norm/norm_forward_args.h"

using LayerNormArgs = NormArgs;

extern const StepTable<LayerNormArgs> layer_norm_steps;
