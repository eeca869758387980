// The gradient of a maximum over some of a tensor's axes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/axes.h"
#include "lib/step.h"

struct AmaxBackwardArgs {
  const void* x;
  const void* out;             // the maxima: [the kept sizes], contiguous
  const void* dout;            // as out
  void* dx;                    // x's sizes, with its order of axes in memory, no two elements in one place
  int rank;                    // 1 to MOST_AXES
  int64_t sizes[MOST_AXES];    // none is 0; less than 2^32 elements an output
  int64_t strides[MOST_AXES];  // of x, in elements; any value, also 0
  int64_t targets[MOST_AXES];  // dx's strides
  bool reduced[MOST_AXES];
  Dtype dtype;           // of all tensors
  const Memory* memory;  // for a workspace
  cudaStream_t stream;
};

void reduction_nd_amax_backward(const AmaxBackwardArgs& args);
