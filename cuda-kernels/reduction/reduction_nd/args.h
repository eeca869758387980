// What a reduction_nd launcher gets: out = the sum of x over some of its axes, the mean, the maximum or its
// place.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "axes.h"
#include "lib/step.h"

enum class ReductionKind { sum, mean, max, argmax };

struct ReductionNdArgs {
  const void* x;
  void* out;  // [the sizes that are not reduced], contiguous, apart from x; of x's dtype, or for argmax int64
  int rank;   // 1 to MOST_AXES
  int64_t sizes[MOST_AXES];
  int64_t strides[MOST_AXES];  // in elements, any, 0 too
  bool reduced[MOST_AXES];     // for max and argmax, these hold elements
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
