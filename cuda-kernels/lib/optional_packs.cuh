// Packs of operands that a call may leave out.
#pragma once

#include "alignment.h"
#include "packs.cuh"

// Loads a pack of what is added; zeros if there is none.
template <Alignment ALIGNMENT, typename T>
__device__ Pack<T> load_added(const T* added, int first, int n) {
  if (added == nullptr) return {};
  if (ALIGNMENT != Alignment::ELEMENT) return {__ldcg(reinterpret_cast<const uint4*>(added + first))};
  return load_ragged(added, first, n, 0.0f);
}

// Loads a pack of weights; ones if there are none.
template <typename T>
__device__ Pack<T> load_weights(const void* weight, int64_t start, int first, int n) {
  if (weight) return load_ragged(static_cast<const T*>(weight) + start, first, n, 0.0f);
  Pack<T> ones;
#pragma unroll
  for (int i = 0; i < Pack<T>::SIZE; ++i) set(ones, i, from_float<T>(1.0f));
  return ones;
}
