// The arguments of the norms' launchers, forward and backward.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/step.h"

// Row strides count elements; 0 where one row is seen M times.
struct NormBackwardArgs {
  const void* dout;    // [M, N], rows contiguous
  const void* x;       // [M, N], rows contiguous: what was normalised
  const void* weight;  // [N], or null for ones
  const void* dadded;  // [M, N], rows contiguous, the sum's own gradient; or null
  const float* mean;   // [M]; null for rms_norm
  const float* rstd;   // [M]
  void* dx;            // [M, N], contiguous
  void* dweight;       // [N], or null if not wanted
  void* dbias;         // [N], or null if not wanted
  int64_t M, N;
  int64_t stride_dm, stride_xm, stride_am;  // of dout, x and dadded
  Dtype dtype;                              // of all but mean and rstd
  const Memory* memory;
  cudaStream_t stream;
};
