// Activations as accurate as a dtype is, and the choice of a kernel by dtype and activation.
#pragma once

#include <type_traits>

#include "activation.cuh"

// The activation of x. The error of gelu's short form would show in fp32.
template <typename T, Activation ACTIVATION>
__device__ float activate_for(float x) {
  if constexpr (ACTIVATION == Activation::gelu && std::is_same_v<T, float>) {
    return 0.5f * x * (1.0f + erff(SQRT_HALF * x));
  } else {
    return activate<ACTIVATION>(x);
  }
}

// Calls function.operator()<T, ACTIVATION>().
template <typename Function>
void dispatch(Dtype dtype, Activation activation, Function function) {
  dispatch(dtype, [&](auto zero) {
    with_activation(activation, [&]<Activation ACTIVATION>() {
      function.template operator()<decltype(zero), ACTIVATION>();
    });
  });
}
