// What the steps of dropout_add that take packs of 16 bytes share: packs of a matrix, and what becomes of
// one.
#pragma once

#include "../dropout.cuh"
#include "args.h"

// A pack of elements from a place on, `count` of them or as many as a pack has, one by one. Across the end of
// a row it goes on in the next one; a bias has rows that lie 0 apart.
template <typename T>
__device__ Pack<T> load_elements(const void* matrix, int64_t stride, Place place, int64_t N, int count) {
  Pack<T> pack = {};
#pragma unroll
  for (int j = 0; j < Pack<T>::SIZE; ++j, place = next(place, N)) {
    if (j < count) set(pack, j, static_cast<const T*>(matrix)[place.row * stride + place.col]);
  }
  return pack;
}

template <typename T>
__device__ const uint4* pack_at(const void* matrix, int64_t stride, Place place) {
  return reinterpret_cast<const uint4*>(static_cast<const T*>(matrix) + place.row * stride + place.col);
}

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
    // Of all elements, and then a choice: asked for where it is kept, every element would have a branch.
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
