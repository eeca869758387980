// What a pack of the forward pass becomes, and the choice of a kernel by its operands.
#pragma once

#include "args.h"
#include "dropout/dropout_packs.cuh"
#include "lib/activation_by_dtype.cuh"
#include "lib/values.cuh"

template <typename T, Activation ACTIVATION, Operand RESIDUAL, Operand BIAS>
struct Forward {
  float scale;

  __device__ Pack<T> operator()(const bool (&kept)[Pack<T>::SIZE], Pack<T> x, Pack<T> residual,
                                Pack<T> bias) const {
    const Values<T> xs(x), residuals(residual), shifts(bias);
    Pack<T> results;
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) {
      float value = xs.of[j];
      if (BIAS == Operand::GIVEN) value += shifts.of[j];
      // Computed for all elements, then selected: computed only where kept, each would take a branch.
      value = activate_for<T, ACTIVATION>(value) * scale;
      value = kept[j] ? value : 0.0f;
      if (RESIDUAL == Operand::GIVEN) value += residuals.of[j];
      set(results, j, from_float<T>(value));
    }
    return results;
  }
};

inline PackArgs packs_of(const DropoutAddArgs& args) {
  return {{.first = args.x,
           .second = args.residual,
           .bias = args.bias,
           .out = args.out,
           .M = args.M,
           .N = args.N,
           .stride_first = args.stride_xm,
           .stride_second = args.stride_rm},
          args.dropout};
}

// Calls launch.operator()<RESIDUAL, BIAS>().
template <typename Launch>
void with_operands(const DropoutAddArgs& args, Launch launch) {
  const auto with_residual = [&]<Operand RESIDUAL>() {
    args.bias ? launch.template operator()<RESIDUAL, Operand::GIVEN>()
              : launch.template operator()<RESIDUAL, Operand::MISSING>();
  };
  args.residual ? with_residual.template operator()<Operand::GIVEN>()
                : with_residual.template operator()<Operand::MISSING>();
}
