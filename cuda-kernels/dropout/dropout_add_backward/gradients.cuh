// The gradients of a pack: dx, before or after it is rounded.
#pragma once

#include "args.h"
#include "dropout/dropout_packs.cuh"
#include "gradient.cuh"

// A pack of dx, before it is rounded.
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

template <typename T, Activation ACTIVATION, Operand BIAS>
struct Backward {
  float scale;

  __device__ Pack<T> operator()(const bool (&kept)[Pack<T>::SIZE], Pack<T> dout, Pack<T> x,
                                Pack<T> bias) const {
    return Gradients<T, ACTIVATION, BIAS>(kept, dout, x, bias, scale).rounded();
  }
};

// The operands of a launch that computes dx alone.
template <Activation ACTIVATION>
PackArgs pack_args(const DropoutAddBackwardArgs& args) {
  return {.first = args.dout,
          .second = args.x,
          .bias = ACTIVATION == Activation::none ? nullptr : args.bias,
          .out = args.dx,
          .M = args.M,
          .N = args.N,
          .stride_first = args.stride_dm,
          .stride_second = args.stride_xm,
          .dropout = args.dropout};
}
