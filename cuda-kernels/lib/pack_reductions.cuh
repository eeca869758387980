// Reductions of the elements of a pack: their sum, and the largest of them, NaN if one is NaN.
#pragma once

#include "common.cuh"

// The larger of two numbers; NaN if either is NaN.
__device__ inline float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The largest element of a pack, NaN if one is NaN, by packed maxima of two where two elements fit a
// register.
__device__ inline float largest(const Pack<float>& pack) {
  return larger(larger(pack[0], pack[1]), larger(pack[2], pack[3]));
}
__device__ inline float largest(const Pack<__nv_bfloat16>& pack) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&pack.words);
  const __nv_bfloat162 most = __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3]));
  return larger(__low2float(most), __high2float(most));
}
__device__ inline float largest(const Pack<__half>& pack) {
  const auto* pairs = reinterpret_cast<const __half2*>(&pack.words);
  const __half2 most = __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3]));
  return larger(__low2float(most), __high2float(most));
}

// The sum of COUNT elements from BEGIN on, by a tree: shorter chains of dependent additions than a loop, and
// fewer roundings for each element.
template <int BEGIN, int COUNT, typename T>
__device__ float sum_of(const Pack<T>& pack) {
  if constexpr (COUNT == 1) {
    return to_float(pack[BEGIN]);
  } else {
    return sum_of<BEGIN, COUNT / 2>(pack) + sum_of<BEGIN + COUNT / 2, COUNT / 2>(pack);
  }
}
template <typename T>
__device__ float sum_of(const Pack<T>& pack) {
  return sum_of<0, Pack<T>::SIZE>(pack);
}
