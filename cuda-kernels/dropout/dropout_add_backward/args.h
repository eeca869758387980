// dx = dout * mask / (1 - p) * activation'(x + bias), and dbias = sum(dx) over the columns.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dropout/dropout.h"
#include "lib/activation.h"
#include "lib/step.h"

struct DropoutAddBackwardArgs {
  const void* dout;  // [M, N], rows contiguous
  const void* x;     // [M, N], rows contiguous; null exactly where there is no activation
  const void* bias;  // [N]; or null
  void* dx;          // [M, N], contiguous
  void* dbias;       // [N], or null if not wanted
  int64_t M, N;
  int64_t stride_dm, stride_xm;  // in elements; 0 where one row is seen M times
  Dtype dtype;                   // of all of them
  Activation activation;
  Dropout dropout;
  const Memory* memory;
  cudaStream_t stream;
};

extern const StepTable<DropoutAddBackwardArgs> dropout_add_backward_steps;
