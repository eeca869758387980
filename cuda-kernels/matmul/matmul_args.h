// The arguments of every matmul's launchers: out = a @ b.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/step.h"

// Strides count elements and may be 0. T is void where dtype says what the pointers hold.
template <typename T>
struct MatmulArgs {
  const T* a;  // [M, K]
  const T* b;  // [K, N]
  T* out;      // [M, N], row-major, apart from a and b
  int64_t M, N, K;
  int64_t stride_am, stride_ak;
  int64_t stride_bk, stride_bn;
  Dtype dtype;      // of a and b
  Dtype out_dtype;  // the same, or fp32
  const Memory* memory;
  cudaStream_t stream;
};
