// Arguments of a reduction_nd launcher: out = the sum, mean, maximum or argmax of x over some of its axes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "axes.h"
#include "lib/step.h"

enum class ReductionKind { sum, mean, max, argmax };

struct ReductionNdArgs {
  const void* x;
  void* out;  // [the kept sizes], contiguous, not overlapping x; of x's dtype, int64 for argmax
  int rank;   // 1 to MOST_AXES
  int64_t sizes[MOST_AXES];
  int64_t strides[MOST_AXES];  // in elements; any value, also 0
  bool reduced[MOST_AXES];     // for max and argmax, no reduced axis is empty
  ReductionKind kind;
  Dtype dtype;           // of x
  const Memory* memory;  // for a workspace and zeroed memory
  cudaStream_t stream;

  Axes kept_axes() const { return axes_of(rank, sizes, strides, reduced, false, true); }
  Axes reduced_axes() const {
    return axes_of(rank, sizes, strides, reduced, true, kind == ReductionKind::argmax);
  }
};

extern const StepTable<ReductionNdArgs> reduction_nd_steps;
