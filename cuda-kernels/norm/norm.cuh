// Device code of the norms' forward kernels: a row's operands, the register-resident row, mean and rstd.
// Terms: docs/glossary.md.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lib/packs.cuh"
#include "norm_args.h"

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

// 1 / sqrt(variance + eps) of a row of N elements; `squares` is the sum of their squared distances from the
// mean, which is 0 for rms_norm.
__device__ inline float rstd_of(float squares, int64_t N, float eps) {
  return rsqrtf(squares / static_cast<float>(N) + eps);
}

// Loads the pack that starts at column `first` of a weight or bias of n elements; it stays in L1 and L2. If
// its address is not a multiple of 16 bytes, it spans two packs of memory, which are loaded and shifted
// together. Elements outside of the weight or bias are undefined.
template <typename T>
__device__ Pack<T> load_factors(const T* factors, int first, int n) {
  constexpr int SIZE = Pack<T>::SIZE;
  const int skew = skew_of(factors + first);
  first -= skew;
  const auto load = [&](int at) {  // 16 bytes that hold one of its elements can all be read
    return max(at, 0) < min(n, at + SIZE) ? __ldg(reinterpret_cast<const uint4*>(factors + at)) : uint4{};
  };
  const uint4 low = load(first);
  return skew == 0 ? Pack<T>{low} : put_together<T>(low, load(first + SIZE), skew);
}

// The output for one pack of a row. weight_of() and bias_of() return the matching packs; they are called only
// if the row has a weight, or a bias. Without CENTERED (rms_norm) `mean` is unused.
template <bool CENTERED, typename T, typename WeightOf, typename BiasOf>
__device__ Pack<T> normalised(const NormRow<T>& row, Pack<T> pack, float mean, float rstd, WeightOf weight_of,
                              BiasOf bias_of) {
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

// A register-resident row: n elements as packs, spread over `threads` threads, of which this is number
// `thread`. Packs are those of memory, so the first and the last may reach beyond the row. Without CENTERED
// (rms_norm) the mean is 0. WHOLE: every row is whole packs, and out, residual and added are aligned like x.
template <typename T, int PACKS, bool CENTERED, bool WHOLE>
struct HeldRow {
  static constexpr int SIZE = Pack<T>::SIZE;
  Pack<T> packs[PACKS];
  int n, skew, thread, threads;

  __device__ HeldRow(int n, int skew, int thread, int threads)
      : n(n), skew(WHOLE ? 0 : skew), thread(thread), threads(threads) {}

  __device__ int first_of(int i) const { return (i * threads + thread) * SIZE - skew; }

  // Issues the loads of the row; finish_load waits for them.
  __device__ void load(const T* x) {
    load_touching_packs(packs, x, n, [this](int i) { return first_of(i); });
  }
  __device__ void finish_load(const NormRow<T>& row) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (!WHOLE) mask_beside(packs[i], first_of(i), n);
      if (row.residual) packs[i] = add_residual(row, packs[i], first_of(i), n);
    }
  }

  // The sum of this thread's elements; elements outside of the row are 0.
  __device__ float sum() {
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(packs[i]);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) mine += to_float(packs[i][j]);
    }
    return mine;
  }

  // The sum of this thread's squared distances from the mean.
  __device__ float squares(float mean) {
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(packs[i]);
      const int first = first_of(i);
      if (!CENTERED || (WHOLE ? first < n : is_whole<T>(first, n))) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
          const float distance = CENTERED ? to_float(packs[i][j]) - mean : to_float(packs[i][j]);
          mine = fmaf(distance, distance, mine);
        }
      } else if (!WHOLE && first < n) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
          const float distance = to_float(packs[i][j]) - mean;
          if (first + j >= 0 && first + j < n) mine = fmaf(distance, distance, mine);
        }
      }
    }
    return mine;
  }

  // Writes the output. weight_of(i, first) and bias_of(i, first) return packs; they are called only if there
  // is a weight, or a bias.
  template <typename WeightOf, typename BiasOf>
  __device__ void write(const NormRow<T>& row, float mean, float rstd, WeightOf weight_of, BiasOf bias_of) {
    const bool aligned = WHOLE || skew_of(row.out) == skew % SIZE;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int first = first_of(i);
      if (first >= n) break;
      keep_packed(packs[i]);
      const Pack<T> results = normalised<CENTERED>(
          row, packs[i], mean, rstd, [&] { return weight_of(i, first); }, [&] { return bias_of(i, first); });
      if (WHOLE) {
        __stwb(reinterpret_cast<uint4*>(row.out + first), results.words);
      } else {
        store_pack(row.out, first, n, aligned, results);
      }
    }
  }
  __device__ void write(const NormRow<T>& row, float mean, float rstd) {
    write(
        row, mean, rstd, [&](int, int first) { return load_factors(row.weight, first, n); },
        [&](int, int first) { return load_factors(row.bias, first, n); });
  }
};

// Whether the WHOLE kernels apply: in every matrix all rows start at multiples of 16 bytes and are whole
// packs.
template <typename T>
bool are_whole(const NormArgs& args) {
  const auto fits = [](int64_t stride) { return stride % Pack<T>::SIZE == 0; };
  return fits(args.N) && fits(args.stride_xm) && (!args.residual || fits(args.stride_rm)) &&
         aligned_to_16_bytes(args.x, args.residual, args.weight, args.bias, args.out, args.added);
}

// LANES lanes of a warp take one row, of at most LANES * PACKS packs; a block of THREADS takes THREADS /
// LANES rows.
template <typename T, int THREADS, int LANES, int PACKS, bool CENTERED, bool WHOLE>
__device__ void normalise_by_lanes(const NormArgs& args) {
  constexpr int ROWS = THREADS / LANES;
  const int N = static_cast<int>(args.N);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  // Lanes past the last row stay for the shuffles, with the last row's values.
  const NormRow<T> row(args, min(index, args.M - 1));
  HeldRow<T, PACKS, CENTERED, WHOLE> held(N, skew_of(row.x), threadIdx.x % LANES, LANES);
  held.load(row.x);
  held.finish_load(row);
  const float mean = CENTERED ? lanes_sum<LANES>(held.sum()) / static_cast<float>(N) : 0.0f;
  const float rstd = rstd_of(lanes_sum<LANES>(held.squares(mean)), N, args.eps);
  if (index >= args.M) return;
  if (threadIdx.x % LANES == 0) {
    if (CENTERED) args.mean[index] = mean;
    args.rstd[index] = rstd;
  }
  held.write(row, mean, rstd);
}

// A block takes one row, of at most blockDim.x * PACKS packs. Packs are counted from the multiple of BYTES at
// or before the row's start: 16, or a line, so that a warp's loads cover whole lines.
template <typename T, int PACKS, bool CENTERED, bool WHOLE, int BYTES = 16>
__device__ void normalise_by_block(const NormArgs& args) {
  __shared__ float mean_parts[32], square_parts[32];
  const int N = static_cast<int>(args.N);
  const NormRow<T> row(args, blockIdx.x);
  HeldRow<T, PACKS, CENTERED, WHOLE> held(N, skew_of<BYTES>(row.x), threadIdx.x, blockDim.x);
  held.load(row.x);
  held.finish_load(row);
  const float mean = CENTERED ? block_sum(held.sum(), mean_parts) / static_cast<float>(N) : 0.0f;
  const float rstd = rstd_of(block_sum(held.squares(mean), square_parts), N, args.eps);
  if (threadIdx.x == 0) {
    if (CENTERED) args.mean[blockIdx.x] = mean;
    args.rstd[blockIdx.x] = rstd;
  }
  held.write(row, mean, rstd);
}

// The most packs that a row of x touches; misaligned rows may touch one more.
template <typename T>
int64_t packs_of(const NormArgs& args) {
  const bool skewed = reinterpret_cast<uintptr_t>(args.x) % 16 || args.stride_xm % Pack<T>::SIZE;
  return skewed ? most_packs<T>(args.N) : cdiv(args.N, Pack<T>::SIZE);
}
