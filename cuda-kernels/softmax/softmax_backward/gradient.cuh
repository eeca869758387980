// What stands in the gradient, given the sum over the row of each element's term.
#pragma once

#include "lib/packs.cuh"

// The logarithm's terms are dout alone.
__device__ inline float term_of(float dout, float y, bool log) { return log ? dout : dout * y; }

struct SoftmaxGradient {
  float sum;
  __device__ float operator()(float dout, float y) const { return y * (dout - sum); }
};
struct LogSoftmaxGradient {
  float sum;
  __device__ float operator()(float dout, float y) const { return dout - exp_of(y) * sum; }
};
