// out = a + b over contiguous vectors.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/step.h"

struct VectorAddArgs {
  const void* a;  // [n]
  const void* b;  // [n]
  void* out;      // [n]; may be a or b, but must not overlap them otherwise
  int64_t n;
  Dtype dtype;  // of a, b and out
  cudaStream_t stream;
};

extern const StepTable<VectorAddArgs> vector_add_steps;
