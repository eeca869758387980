// Arguments of a launcher of cross entropy's backward pass: the gradient of the logits from that of the
// losses.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lib/step.h"

struct CrossEntropyBackwardArgs {
  const void* logits;     // [M, N], rows contiguous
  const int64_t* target;  // [M]; a row whose target is ignore_index gets zeros
  const float* lse;       // [M], as written by the forward pass
  const void* dout;       // [M], of dout_dtype
  void* out;              // [M, N], rows contiguous, of the logits' dtype; from v02 on it may be the logits
  int64_t M, N;
  int64_t stride_lm, stride_dm, stride_om;  // in elements; 0 if logits, or dout, repeat one row
  int64_t ignore_index;
  Dtype dtype;      // of logits and out
  float smoothing;  // the part of the target's weight of 1 that all classes share
  cudaStream_t stream;
  Dtype dout_dtype = Dtype::fp32;  // or the logits'
  const float* scale = nullptr;    // one number that all of dout is multiplied by; or null for 1
};

extern const StepTable<CrossEntropyBackwardArgs> cross_entropy_backward_steps;
