// What the norms' forward kernels are made of: the operands of a row, the row in registers, its statistics.
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

  // What is normalised: x, or its sum with the residual, rounded as it is returned.
  __device__ T input(int64_t col) const {
    return residual ? from_float<T>(to_float(x[col]) + to_float(residual[col])) : x[col];
  }

  // The result for an element that is (x - mean) * rstd.
  __device__ T result(float unit, int64_t col) const {
    if (weight) unit *= to_float(weight[col]);
    if (bias) unit += to_float(bias[col]);
    return from_float<T>(unit);
  }
};

// One over the root of what a row of N elements is divided by, from the sum of its squared distances.
__device__ inline float rstd_of(float squares, int64_t N, float eps) {
  return rsqrtf(squares / static_cast<float>(N) + eps);
}

// The pack that begins `skew` elements behind the first of two.
template <typename T>
__device__ Pack<T> put_together(uint4 low, uint4 high, int skew) {
  uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const int bytes = skew * static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = bytes & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = bytes & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], bytes % 4 * 8);
  return {make_uint4(words[0], words[1], words[2], words[3])};
}

// A pack of a weight or bias that starts at `first`; these stay in L1 and L2. Where that is no multiple of 16
// bytes, the pack lies in two of memory's, and is put together. Elements beside the n are anything.
template <typename T>
__device__ Pack<T> load_factors(const T* factors, int first, int n) {
  constexpr int SIZE = Pack<T>::SIZE;
  const int skew = skew_of(factors + first);
  first -= skew;
  const auto load = [&](int at) {  // of 16 bytes in which something is the factors', all can be read
    return max(at, 0) < min(n, at + SIZE) ? __ldg(reinterpret_cast<const uint4*>(factors + at)) : uint4{};
  };
  const uint4 low = load(first);
  return skew == 0 ? Pack<T>{low} : put_together<T>(low, load(first + SIZE), skew);
}

// The result for a pack of a row. weight_of() and bias_of() give theirs, and are asked where there are any.
// Without CENTERED mean is not looked at.
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

// A pack of x plus that of the residual, which is stored as well. Rows may be skewed otherwise than x's.
template <typename T>
__device__ Pack<T> add_residual(const NormRow<T>& row, Pack<T> pack, int first, int n) {
  const bool wide = skew_of(row.residual + first) == 0 && is_whole<T>(first, n);
  pack = pack + (wide ? Pack<T>{__ldcg(reinterpret_cast<const uint4*>(row.residual + first))}
                      : load_ragged(row.residual, first, n, 0.0f));
  store_pack(row.added, first, n, skew_of(row.added + first) == 0, pack);
  return pack;
}

// A row of n elements in the registers of `threads` threads, of which this one is `thread`: packs of 16
// bytes, as the row lies in memory. Without CENTERED the mean is taken to be 0. WHOLE: no pack of any row
// reaches beyond it, and out, residual and added are aligned like x.
template <typename T, int PACKS, bool CENTERED, bool WHOLE>
struct HeldRow {
  static constexpr int SIZE = Pack<T>::SIZE;
  Pack<T> packs[PACKS];
  int n, skew, thread, threads;

  __device__ HeldRow(int n, int skew, int thread, int threads)
      : n(n), skew(WHOLE ? 0 : skew), thread(thread), threads(threads) {}

  __device__ int first_of(int i) const { return (i * threads + thread) * SIZE - skew; }

  // Only asks for the row; finish_load waits for it.
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

  // Of this thread's elements; those beside the row are 0.
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

  // Of their squared distances from the mean.
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

  // weight_of(i, first) and bias_of(i, first) are packs, asked for where there is a weight or a bias.
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

// Whether the kernels for WHOLE rows take these: all start at multiples of 16 bytes and have only whole
// packs.
template <typename T>
bool are_whole(const NormArgs& args) {
  const auto fits = [](int64_t stride) { return stride % Pack<T>::SIZE == 0; };
  return fits(args.N) && fits(args.stride_xm) && (!args.residual || fits(args.stride_rm)) &&
         aligned_to_16_bytes(args.x, args.residual, args.weight, args.bias, args.out, args.added);
}

// A row for every LANES lanes of a block of THREADS, of at most LANES * PACKS packs.
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

// A row for every block, of at most blockDim.x * PACKS packs, which are counted from a multiple of BYTES.
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

// Packs that a row of x touches at most.
template <typename T>
int64_t packs_of(const NormArgs& args) {
  const bool skewed = reinterpret_cast<uintptr_t>(args.x) % 16 || args.stride_xm % Pack<T>::SIZE;
  return skewed ? most_packs<T>(args.N) : cdiv(args.N, Pack<T>::SIZE);
}
