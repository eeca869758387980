// Arguments of a reduction_nd launcher: out = the sum, mean, maximum or argmax of x over some of its axes.
#pragma once

#include <cuda_runtime_api.h>

#include "lib/axes.h"
#include "lib/step.h"

enum class ReductionKind { sum, mean, max, argmax };

struct ReductionNdArgs {
  const void* x;
  void* out;           // [the kept sizes], contiguous, not overlapping x; of x's dtype, int64 for argmax
  Axes kept, reduced;  // of x, with any strides, also 0; for max and argmax, no reduced axis is empty
  ReductionKind kind;
  Dtype dtype;           // of x
  const Memory* memory;  // for a workspace and zeroed memory
  cudaStream_t stream;

  // Of the stored sum: the number of elements for a mean, else 1.
  float divisor() const { return kind == ReductionKind::mean ? static_cast<float>(reduced.count) : 1.0f; }
};

extern const StepTable<ReductionNdArgs> reduction_nd_steps;
