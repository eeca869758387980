// The reduction of the rows' losses to one number: their sum, or their mean over the rows that are not
// ignored.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/step.h"

struct CrossEntropyMeanArgs {
  const float* losses;    // [M], 0 for ignored rows
  const int64_t* target;  // [M]
  void* loss;             // one number
  float* scale;           // weight of a row's loss: 1, or 1 / rows that are not ignored
  int64_t M;
  int64_t ignore_index;
  Dtype dtype;  // of loss
  bool mean;
  const Memory* memory;
  cudaStream_t stream;
};

void cross_entropy_mean(const CrossEntropyMeanArgs& args);
