// The gradient of one element.
#pragma once

#include "lib/activation_by_dtype.cuh"

// The gradient of a kept element, back through the scale and through the activation, whose argument was z.
template <Activation ACTIVATION>
__device__ float gradient(float dout, float z, float scale) {
  if constexpr (ACTIVATION == Activation::none) return dout * scale;
  const float slope = derivative<ACTIVATION>(z);
  // 0 even for an infinite gradient, where the product would be NaN.
  if (ACTIVATION == Activation::relu && slope == 0.0f) return 0.0f;
  return dout * scale * slope;
}
