// What a cross entropy launcher gets: the losses of the rows of a matrix of logits, each row's class known.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/step.h"

struct CrossEntropyArgs {
  const void* logits;     // [M, N], rows contiguous
  const int64_t* target;  // [M]; a row whose target is ignore_index gets 0 in both outputs
  float* losses;          // [M]
  float* lse;             // [M], the logarithms of the sums of exponentials; nullptr where nobody asks
  int64_t M, N;
  int64_t stride_lm;  // in elements; 0 where one row is seen M times
  int64_t ignore_index;
  Dtype dtype;      // of the logits
  float smoothing;  // what all classes share of the target's weight of 1
  cudaStream_t stream;
};

extern const StepTable<CrossEntropyArgs> cross_entropy_steps;
