// A row's operands, and packs of its result: shared by the norms' forward kernels. Terms: docs/glossary.md.
#pragma once

#include "lib/packs.cuh"
#include "norm_statistics.cuh"

// The operands of a row, or of the part of it that begins at column `start`.
template <typename T>
struct NormRow {
  const T* x;
  const T* residual;  // null where there is none; so are weight and bias
  const T* weight;
  const T* bias;
  T* out;
  T* added;

  __device__ NormRow(const NormArgs& args, int64_t row, int64_t start = 0)
      : x(static_cast<const T*>(args.x) + row * args.stride_xm + start),
        residual(args.residual ? static_cast<const T*>(args.residual) + row * args.stride_rm + start
                               : nullptr),
        weight(args.weight ? static_cast<const T*>(args.weight) + start : nullptr),
        bias(args.bias ? static_cast<const T*>(args.bias) + start : nullptr),
        out(static_cast<T*>(args.out) + row * args.N + start),
        added(args.added ? static_cast<T*>(args.added) + row * args.N + start : nullptr) {}

  // The element to normalise: x, or x + residual, rounded to T as `added` returns it.
  __device__ T input(int64_t col) const {
    return residual ? from_float<T>(to_float(x[col]) + to_float(residual[col])) : x[col];
  }

  // The output for one element; `unit` is (x - mean) * rstd.
  __device__ T result(float unit, int64_t col) const {
    if (weight) unit *= to_float(weight[col]);
    if (bias) unit += to_float(bias[col]);
    return from_float<T>(unit);
  }
};

// The output for one pack of a row. weight_of() and bias_of() return the matching packs; they are called only
// if the row has a weight, or a bias. `mean` is unused for rms_norm.
template <Norm NORM, typename T, typename WeightOf, typename BiasOf>
__device__ Pack<T> normalised(const NormRow<T>& row, Pack<T> pack, float mean, float rstd, WeightOf weight_of,
                              BiasOf bias_of) {
  constexpr bool CENTERED = NORM == Norm::LAYER;
  constexpr int SIZE = Pack<T>::SIZE;
  float units[SIZE];
#pragma unroll
  for (int j = 0; j < SIZE; ++j) units[j] = (CENTERED ? to_float(pack[j]) - mean : to_float(pack[j])) * rstd;
  if (row.weight) {
    const Pack<T> weights = weight_of();
#pragma unroll
    for (int j = 0; j < SIZE; ++j) units[j] *= to_float(weights[j]);
  }
  if (row.bias) {
    const Pack<T> biases = bias_of();
#pragma unroll
    for (int j = 0; j < SIZE; ++j) units[j] += to_float(biases[j]);
  }
  Pack<T> results;
#pragma unroll
  for (int j = 0; j < SIZE; ++j) set(results, j, from_float<T>(units[j]));
  return results;
}

// Adds the residual's pack to a pack of x, and stores the sum to `added`. The skew of residual and added may
// differ from x's.
template <typename T>
__device__ Pack<T> add_residual(const NormRow<T>& row, Pack<T> pack, int first, int n) {
  const bool wide = skew_of(row.residual + first) == 0 && is_whole<T>(first, n);
  pack = pack + (wide ? Pack<T>{__ldcg(reinterpret_cast<const uint4*>(row.residual + first))}
                      : load_ragged(row.residual, first, n, 0.0f));
  store_pack(row.added, first, n, skew_of(row.added + first) == 0, pack);
  return pack;
}

// Whether rows of all but x and the residual have the alignment of a PACK.
template <typename T>
bool writes_packs(const NormArgs& args) {
  return args.N % Pack<T>::SIZE == 0 && aligned_to_16_bytes(args.weight, args.bias, args.out, args.added);
}
// Whether all rows have it.
template <typename T>
bool are_whole(const NormArgs& args) {
  const auto fits = [](int64_t stride) { return stride % Pack<T>::SIZE == 0; };
  return writes_packs<T>(args) && fits(args.stride_xm) && (!args.residual || fits(args.stride_rm)) &&
         aligned_to_16_bytes(args.x, args.residual);
}
