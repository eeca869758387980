// Arguments of a cross entropy launcher: the losses of the rows of a matrix of logits, given each row's
// class.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/step.h"

struct CrossEntropyArgs {
  const void* logits;     // [M, N], rows contiguous
  const int64_t* target;  // [M]; a row whose target is ignore_index gets 0 in both outputs
  float* losses;          // [M]
  float* lse;             // [M], log(sum(exp(logits))) of each row; nullptr if not wanted
  int64_t M, N;
  int64_t stride_lm;  // in elements; 0 if all M rows are the same memory
  int64_t ignore_index;
  Dtype dtype;      // of the logits
  float smoothing;  // the part of the target's weight of 1 that all classes share
  cudaStream_t stream;
  const Memory* memory = nullptr;  // for cross_entropy_few alone: no step needs any
};

extern const StepTable<CrossEntropyArgs> cross_entropy_steps;
