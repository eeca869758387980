// The arguments of layer_norm's and rms_norm's launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/step.h"

// Row strides count elements; 0 where one row is seen M times.
struct NormArgs {
  const void* x;         // [M, N], rows contiguous
  const void* residual;  // [M, N], rows contiguous, added first; or null
  const void* weight;    // [N], or null for ones
  const void* bias;      // [N], or null for zeros
  void* out;             // [M, N], contiguous
  void* added;           // [M, N], contiguous: x + residual; null exactly where residual is
  float* mean;           // [M]; null for rms_norm
  float* rstd;           // [M], 1 / sqrt(variance + eps), or of the mean square for rms_norm
  int64_t M, N;
  int64_t stride_xm, stride_rm;
  Dtype dtype;  // of all but mean and rstd
  float eps;
  const Memory* memory;
  cudaStream_t stream;
};
