// What softmax's v10 and v13 do with the part of a row that a thread has in registers. Terms:
// docs/glossary.md.
#pragma once

#include "args.h"
#include "lib/exponential.cuh"
#include "lib/held.cuh"
#include "online.cuh"

enum class Form { SOFTMAX, LOGARITHM };

// As Softmax, with all digits of T.
template <typename T>
struct PreciseSoftmax : Softmax {
  using Softmax::Softmax;
  __device__ float operator()(float x) const { return exp_of<T>(x - max) * scale; }
};
template <typename T, Form FORM>
using ResultOf = std::conditional_t<FORM == Form::LOGARITHM, LogSoftmax, PreciseSoftmax<T>>;

// The maximum and sum of a thread's packs and its single element, or -INFINITY. Exponents are relative to the
// thread's own maximum.
template <typename T, int PACKS>
__device__ MaxSum max_sum_of(Pack<T> (&held)[PACKS], float element) {
  float max = element;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) max = fmaxf(max, max_of(held[i]));
  float sum = exp_of(element - origin(max));
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    float pack_sum = 0.0f;  // a separate sum a pack: shorter chains of dependent additions
    keep_packed(held[i]);
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) pack_sum += exp_of(float_of(held[i], j) - origin(max));
    sum += pack_sum;
  }
  return {max, sum};
}

// The result for each element of a pack.
template <typename T, typename Result>
__device__ Pack<T> results_of(const Pack<T>& pack, const Result& result) {
  float values[Pack<T>::SIZE];
#pragma unroll
  for (int j = 0; j < Pack<T>::SIZE; ++j)
    values[j] = result(to_float(pack[j]));  // float_of needs more registers
  Pack<T> results;
  round_to(results, values);
  return results;
}
