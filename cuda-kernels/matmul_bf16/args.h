// out = a @ b for bf16 or fp16, accumulated in fp32. Strides count elements and may be 0.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../step.h"

struct MatmulBf16Args {
  const void* a;  // [M, K]
  const void* b;  // [K, N]
  void* out;      // [M, N], row-major, apart from a and b
  int64_t M, N, K;
  int64_t stride_am, stride_ak;
  int64_t stride_bk, stride_bn;
  Dtype dtype;  // bf16 or fp16, of all three
  cudaStream_t stream;
};

extern const StepTable<MatmulBf16Args> matmul_bf16_steps;
