// out = x * rstd * weight over the rows of a matrix.
#pragma once

#include "norm/norm_forward_args.h"

using RmsNormArgs = NormArgs;

extern const StepTable<RmsNormArgs> rms_norm_steps;
