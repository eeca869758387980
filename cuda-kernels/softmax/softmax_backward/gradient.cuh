// The gradient of softmax and of its logarithm: a term of each element is summed over the row, and the sum
// gives each element's gradient.
#pragma once

#include "lib/exponential.cuh"

// An element's term: dout * y, or dout alone for the logarithm.
__device__ inline float term_of(float dout, float y, bool log) { return log ? dout : dout * y; }

struct SoftmaxGradient {
  float sum;
  __device__ float operator()(float dout, float y) const { return y * (dout - sum); }
};
struct LogSoftmaxGradient {
  float sum;
  __device__ float operator()(float dout, float y) const { return dout - exp_of(y) * sum; }
};
// As LogSoftmaxGradient, with all digits of T.
template <typename T>
struct PreciseLogGradient {
  float sum;
  __device__ float operator()(float dout, float y) const { return dout - exp_of<T>(y) * sum; }
};
