// The results for one pack, for dropout_add's v03 and v04.
#pragma once

#include "args.h"
#include "dropout/dropout_packs.cuh"

// The results for a pack that begins at element `first`, a multiple of 4.
template <typename T, Activation ACTIVATION>
__device__ Pack<T> results_of(const DropoutAddArgs& args, const Mask& mask, int64_t first, Pack<T> x,
                              Pack<T> bias, Pack<T> residual) {
  constexpr int SIZE = Pack<T>::SIZE;
  float values[SIZE];
  bool kept[SIZE];
  mask.keeps(kept, first);
#pragma unroll
  for (int j = 0; j < SIZE; ++j) values[j] = to_float(x[j]);
  if (args.bias) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] += to_float(bias[j]);
  }
#pragma unroll
  for (int j = 0; j < SIZE; ++j) {
    // Computed for all elements, then selected: computed only where kept, each would take a branch.
    const float result = activate_for<T, ACTIVATION>(values[j]) * args.dropout.scale;
    values[j] = kept[j] ? result : 0.0f;
  }
  if (args.residual) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] += to_float(residual[j]);
  }
  Pack<T> results;
#pragma unroll
  for (int j = 0; j < SIZE; ++j) set(results, j, from_float<T>(values[j]));
  return results;
}
