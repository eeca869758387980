// Arguments of a softmax launcher: out = softmax(x), or its logarithm, over the rows of a matrix.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/step.h"

struct SoftmaxArgs {
  const void* x;  // [M, N], rows contiguous
  void* out;      // [M, N], contiguous, of x's dtype
  int64_t M, N;
  int64_t stride_xm;  // in elements; 0 if all M rows are the same memory
  Dtype dtype;
  bool log;
  const Memory* memory;
  cudaStream_t stream;
};

extern const StepTable<SoftmaxArgs> softmax_steps;
