// exp(x) with as many digits as the result's type has.
#pragma once

#include "packs.cuh"

// exp(x) for a result that is rounded to T. exp_of is 2 to the power of one rounded product, t, whose
// rounding error becomes a relative error of the power: up to 30 units in fp32's last place where |x| is
// large. For fp32 the product's rest is carried: exp(x) = 2^t * exp(x - t * ln 2), whose second factor is 1 +
// rest.
template <typename T>
__device__ float exp_of(float x) {
  float power = exp_of(x);
  if constexpr (sizeof(T) == 4) {
    constexpr float LOG2_E = 1.4426950408889634f;
    constexpr float LN_2 = 0.693147182f, LN_2_REST = -1.90465430e-9f;  // ln 2 is the sum of both
    const float product = x * LOG2_E;
    const float rest = fmaf(product, -LN_2_REST, fmaf(product, -LN_2, x));
    // Beyond, the power is 0 or infinite, and the rest of an infinite x is NaN. False if x is NaN.
    if (fabsf(x) < 88.0f) power = fmaf(power, rest, power);
  }
  return power;
}
