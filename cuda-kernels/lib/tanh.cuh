// tanh of fp32 values by exponentials.
#pragma once

#include "activation.cuh"

// tanh(x), with a relative error of at most 1e-6. 1 - 2 / (1 + e^(2 x)) has the digits of 1, too few for a
// small x, where the series is taken.
__device__ inline float tanh_by_exp2(float x) {
  constexpr float SMALL = 0.25f;
  const float square = x * x;
  float series = fmaf(square, -17.0f / 315.0f, 2.0f / 15.0f);
  series = fmaf(square, series, -1.0f / 3.0f);
  const float far = fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(2.0f * LOG2_E * x)), 1.0f);
  return fabsf(x) < SMALL ? fmaf(x * square, series, x) : far;
}
