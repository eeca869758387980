// out = a @ b for bf16 or fp16, accumulated in fp32.
#pragma once

#include "matmul/matmul_args.h"

using MatmulBf16Args = MatmulArgs<void>;

extern const StepTable<MatmulBf16Args> matmul_bf16_steps;
