// out = the sum of x, accumulated in fp32.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../step.h"

// Called with workspace == nullptr, a launcher writes the bytes that it needs to *workspace_bytes and
// launches nothing.
//
// The workspace is the call's own and holds anything. The zeroed memory outlives the call: it is zero when a
// launch begins to run, no launch that may run at the same time has the same, and a launcher that uses it
// must leave it zero when all that it launched is done. Every stream has its own, and so has every capture of
// one, where it is zeroed inside the graph.
constexpr size_t ZEROED_BYTES = 8192;

struct ReductionArgs {
  const void* x;  // [n]
  float* out;     // one number, apart from x
  int64_t n;
  Dtype dtype;      // of x
  void* workspace;  // [*workspace_bytes]
  size_t* workspace_bytes;
  void* zeroed;  // [ZEROED_BYTES]
  cudaStream_t stream;
};

extern const StepTable<ReductionArgs> reduction_steps;
