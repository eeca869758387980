// out = a @ b in fp32.
#pragma once

#include "matmul/matmul_args.h"

using MatmulFp32Args = MatmulArgs<float>;

extern const StepTable<MatmulFp32Args> matmul_fp32_steps;
