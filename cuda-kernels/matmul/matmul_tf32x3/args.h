// out = a @ b, fp32 in and out, each product made of three in TF32.
#pragma once

#include "matmul/matmul_args.h"

using MatmulTf32x3Args = MatmulArgs<float>;

extern const StepTable<MatmulTf32x3Args> matmul_tf32x3_steps;
