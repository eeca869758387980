// out = activation(x @ weight.T + bias) for bf16 or fp16, accumulated in fp32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/activation.h"
#include "lib/step.h"

struct LinearArgs {
  const void* x;       // [M, K], any strides
  const void* weight;  // [N, K], any strides
  const void* bias;    // [N], contiguous; or nullptr
  void* out;           // [M, N], row-major
  void* pre;           // [M, N], row-major: what the activation was applied to, rounded; or nullptr
  int64_t M, N, K;
  int64_t stride_xm, stride_xk;
  int64_t stride_wn, stride_wk;
  Dtype dtype;  // of all of them
  Activation activation;
  const Memory* memory;
  cudaStream_t stream;
};

// The backward pass beside its two products: dz = dout * activation'(saved), and dbias, dz's column sums. Not
// for the activation none, whose dz is dout. M and N are not 0.
struct LinearBackwardArgs {
  const void* dout;   // [M, N], row-major
  const void* saved;  // [M, N], row-major: pre, or out for relu
  void* dz;           // [M, N], row-major
  void* dbias;        // [N]
  int64_t M, N;
  Dtype dtype;
  Activation activation;
  const Memory* memory;
  cudaStream_t stream;
};

void linear_backward(const LinearBackwardArgs& args);

extern const StepTable<LinearArgs> linear_steps;
