// Arguments of a reduction launcher: out = the sum of x, accumulated in fp32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "lib/step.h"

// Called with workspace == nullptr, a launcher only writes the bytes that it needs to *workspace_bytes.
//
// Workspace and zeroed memory: see Memory in step.h.
struct ReductionArgs {
  const void* x;  // [n]
  float* out;     // one number, not overlapping x
  int64_t n;
  Dtype dtype;      // of x
  void* workspace;  // [*workspace_bytes]
  size_t* workspace_bytes;
  void* zeroed;  // [ZEROED_BYTES]
  cudaStream_t stream;
};

extern const StepTable<ReductionArgs> reduction_steps;
