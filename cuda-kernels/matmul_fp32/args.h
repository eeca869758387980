// out = a @ b in fp32. Strides count elements and may be 0.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../step.h"

struct MatmulFp32Args {
  const float* a;  // [M, K]
  const float* b;  // [K, N]
  float* out;      // [M, N], row-major, apart from a and b
  int64_t M, N, K;
  int64_t stride_am, stride_ak;
  int64_t stride_bk, stride_bn;
  cudaStream_t stream;
};

extern const StepTable<MatmulFp32Args> matmul_fp32_steps;
