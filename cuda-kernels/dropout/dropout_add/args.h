// out = dropout(activation(x + bias)) + residual over the rows of a matrix.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "dropout/dropout.h"
#include "lib/activation.h"
#include "lib/step.h"

struct DropoutAddArgs {
  const void* x;         // [M, N], rows contiguous
  const void* residual;  // [M, N], rows contiguous; or null
  const void* bias;      // [N]; or null
  void* out;             // [M, N], contiguous
  int64_t M, N;
  int64_t stride_xm, stride_rm;  // in elements; 0 where one row is seen M times
  Dtype dtype;                   // of all of them
  Activation activation;
  Dropout dropout;
  cudaStream_t stream;
};

extern const StepTable<DropoutAddArgs> dropout_add_steps;
