// Arguments of a launcher of softmax's backward pass: the gradient of x from dout and from y, the forward
// pass's result.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/step.h"

struct SoftmaxBackwardArgs {
  const void* dout;  // [M, N], rows contiguous
  const void* y;     // [M, N], rows contiguous
  void* out;         // [M, N], contiguous
  int64_t M, N;
  int64_t stride_dm, stride_ym;  // in elements; 0 if all M rows are the same memory
  Dtype dtype;                   // of dout, y and out
  bool log;
  const Memory* memory;
  cudaStream_t stream;
};

extern const StepTable<SoftmaxBackwardArgs> softmax_backward_steps;
