// A pack of dx, for kernels that draw a mask while its packs are loaded.
#pragma once

#include "dropout/drawn_first.cuh"
#include "dropout/operand.h"
#include "gradient.cuh"
#include "lib/values.cuh"

// Before it is rounded.
template <typename T, Activation ACTIVATION, Operand BIAS>
struct Gradients {
  float of[Pack<T>::SIZE];

  __device__ Gradients(const bool (&kept)[Pack<T>::SIZE], Pack<T> dout, Pack<T> x, Pack<T> bias,
                       float scale) {
    const Values<T> douts(dout), xs(x), shifts(bias);
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) {
      const float z = BIAS == Operand::GIVEN ? xs.of[j] + shifts.of[j] : xs.of[j];
      // Computed for all elements, then selected: computed only where kept, each would take a branch.
      const float passed = gradient<ACTIVATION>(douts.of[j], z, scale);
      of[j] = kept[j] ? passed : 0.0f;
    }
  }

  __device__ Pack<T> rounded() const {
    Pack<T> pack;
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) set(pack, j, from_float<T>(of[j]));
    return pack;
  }
};
