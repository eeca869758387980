// out = the sum of x, accumulated in fp32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../step.h"

// Called with workspace == nullptr, a launcher writes the bytes that it needs to *workspace_bytes and
// launches nothing.
struct ReductionArgs {
  const void* x;  // [n]
  float* out;     // one number, apart from x
  int64_t n;
  Dtype dtype;  // of x
  void* workspace;
  size_t* workspace_bytes;
  cudaStream_t stream;
};

extern const StepTable<ReductionArgs> reduction_steps;
