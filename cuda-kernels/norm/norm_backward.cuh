// Device code of the norms' backward kernels. With g = dout * weight and unit = (x - mean) * rstd:
//
//   dx = rstd * (g - mean(g) - unit * mean(g * unit)),  dweight = sum(dout * unit),  dbias = sum(dout)
//
// with means over a row's N elements, sums over the M rows. For rms_norm mean(g) is left out.
#pragma once

#include <algorithm>

#include "lib/alignment.h"
#include "lib/optional_packs.cuh"
#include "lib/partial_sums.cuh"
#include "lib/persistent_rows.cuh"
#include "norm_args.h"
#include "norm_kind.h"

// The sums of a row, or of a part of it.
struct GradientSums {
  float product;  // of g * unit
  float plain;    // of g
};

// The sums over LANES neighbouring lanes; every lane gets them.
template <int LANES = 32>
__device__ GradientSums lanes_sum(GradientSums sums) {
  return {lanes_sum<LANES>(sums.product), lanes_sum<LANES>(sums.plain)};
}

// The sums over all threads of the block, which has whole warps. `parts`: 32, which no thread still reads.
__device__ inline GradientSums block_sum(GradientSums sums, GradientSums* parts) {
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  sums = lanes_sum(sums);
  if (lane_id == 0) parts[warp_id] = sums;
  __syncthreads();  // for every warp's part
  return lanes_sum(lane_id < blockDim.x / 32 ? parts[lane_id] : GradientSums{});
}

// When a persistent kernel issues the loads of the next row: in that row's turn, or before it works on this
// one.
enum class NextRow { IN_TURN, AHEAD };

// A register-resident row of x and dout. Packs are those of memory for x.
template <typename T, int PACKS>
struct HeldOperands {
  Pack<T> x[PACKS], dout[PACKS];

  // Issues the loads of rows of n elements; finish_load waits for them. By single elements: dout whose skew
  // differs from x's, and both `at_end`, where the row's last 16 bytes may reach behind the matrix.
  template <Alignment ALIGNMENT, typename First>
  __device__ void load(const T* row_x, const T* row_dout, int n, bool at_end, First first_of) {
    const auto load_row = [&](Pack<T>(&packs)[PACKS], const T* row, bool by_words) {
      if (ALIGNMENT != Alignment::ELEMENT || by_words) {
        load_touching_packs(packs, row, n, first_of);
      } else {
#pragma unroll
        for (int i = 0; i < PACKS; ++i) packs[i] = load_ragged(row, first_of(i), n, 0.0f);
      }
    };
    load_row(x, row_x, !at_end);
    load_row(dout, row_dout, !at_end && skew_of(row_dout) == skew_of(row_x));
  }
  template <Alignment ALIGNMENT, typename First>
  __device__ void finish_load(int n, First first_of) {
    if constexpr (ALIGNMENT == Alignment::ELEMENT) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        mask_beside(x[i], first_of(i), n);
        mask_beside(dout[i], first_of(i), n);
      }
    }
  }
};

// The columns of one of `threads` threads that share rows of n elements, and its sums over these rows for
// dweight and dbias. All rows must have the same skew, so that the thread's columns stay the same.
template <typename T, int PACKS, Norm NORM, Alignment ALIGNMENT>
struct GradientColumns {
  static constexpr int SIZE = Pack<T>::SIZE;
  static constexpr bool CENTERED = NORM == Norm::LAYER, WHOLE = ALIGNMENT != Alignment::ELEMENT;
  int n, skew, thread, threads;
  float dweight[PACKS][SIZE] = {}, dbias[CENTERED ? PACKS : 1][CENTERED ? SIZE : 1] = {};

  __device__ GradientColumns(int n, int skew, int thread, int threads)
      : n(n), skew(WHOLE ? 0 : skew), thread(thread), threads(threads) {}

  __device__ int first_of(int i) const { return (i * threads + thread) * SIZE - skew; }

  // Adds a row to the columns' sums, and returns the row's sums over this thread's elements; `product` lacks
  // its factor rstd. weight_of(i) returns a pack of weights, or NoWeights.
  template <typename WeightOf>
  __device__ GradientSums add(HeldOperands<T, PACKS>& row, float mean, float rstd, WeightOf weight_of) {
    GradientSums sums = {};
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const auto weights = weight_of(i);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float distance = CENTERED ? to_float(row.x[i][j]) - mean : to_float(row.x[i][j]);
        const float gradient = to_float(row.dout[i][j]);
        dweight[i][j] = fmaf(gradient * rstd, distance, dweight[i][j]);
        if constexpr (CENTERED) dbias[i][j] += gradient;
        const float g = gradient * to_float(weights[j]);
        sums.product = fmaf(g, distance, sums.product);
        if constexpr (CENTERED) sums.plain += g;
      }
      keep_packed(row.x[i]);
      keep_packed(row.dout[i]);
    }
    return sums;
  }

  // Writes dx. `means` are the whole row's sums divided by N. weight_of(i) and added_of(i, first) return
  // packs of weights and of dadded.
  template <typename WeightOf, typename AddedOf>
  __device__ void write(const HeldOperands<T, PACKS>& row, T* dx, float mean, float rstd, GradientSums means,
                        WeightOf weight_of, AddedOf added_of) const {
    const bool aligned = WHOLE || skew_of(dx) == skew;
    const float of_distance = -means.product * rstd * rstd * rstd, of_all = -means.plain * rstd;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int first = first_of(i);
      if (first >= n) break;
      const auto weights = weight_of(i);
      const Pack<T> added = added_of(i, first);
      Pack<T> results;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float distance = CENTERED ? to_float(row.x[i][j]) - mean : to_float(row.x[i][j]);
        const float rest = fmaf(distance, of_distance, of_all + to_float(added[j]));
        set(results, j, from_float<T>(fmaf(to_float(row.dout[i][j]) * rstd, to_float(weights[j]), rest)));
      }
      if (WHOLE) {
        __stwb(reinterpret_cast<uint4*>(dx + first), results.words);
      } else {
        store_pack(dx, first, n, aligned, results);
      }
    }
  }

  // Calls store(col, dweight, dbias) for every column.
  template <typename Store>
  __device__ void for_each(Store store) const {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const int col = first_of(i) + j;
        if (col >= 0 && col < n)
          store(col, dweight[i][j], CENTERED ? dbias[CENTERED ? i : 0][CENTERED ? j : 0] : 0.0f);
      }
    }
  }
};

// Whether rows have the alignment of a PACK.
template <typename T>
bool are_whole(const NormBackwardArgs& args) {
  const auto fits = [](int64_t stride) { return stride % Pack<T>::SIZE == 0; };
  return fits(args.N) && fits(args.stride_xm) && fits(args.stride_dm) &&
         (!args.dadded || fits(args.stride_am)) &&
         aligned_to_16_bytes(args.x, args.dout, args.dadded, args.dx);
}

// The most packs that a row of x touches; misaligned rows may touch one more.
template <typename T>
int64_t packs_of(const NormBackwardArgs& args) {
  const bool skewed = reinterpret_cast<uintptr_t>(args.x) % 16 || args.stride_xm % Pack<T>::SIZE;
  return skewed ? most_packs<T>(args.N) : cdiv(args.N, Pack<T>::SIZE);
}

// Launches kernel(args, period, more..., workspace), of whose blocks each has at most threads * packs packs
// of a row, then sum_kernel. False if the GPU has no room for the cluster, or there are no rows.
template <typename T, typename Kernel, typename... More>
bool launch_persistent(const NormBackwardArgs& args, Kernel* kernel, int blocks, int packs, bool centered,
                       void (*sum_kernel)(const float*, int, int64_t, T*, T*), More... more) {
  const int64_t each = cdiv(packs_of<T>(args), blocks);
  const int threads = static_cast<int>(cdiv(cdiv(each, packs), 32) * 32);
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), blocks, threads,
                       threads * packs * static_cast<int>(sizeof(uint4)), args.stream);
  const int period = skew_period<T>(args.stride_xm);
  const int clusters = static_cast<int>(std::min<int64_t>(args.M, launch.resident()));
  if (clusters == 0) return false;
  launch_with_sums<T>(
      args, clusters + period - 1, centered,
      [&](float* workspace) { launch(clusters, kernel, args, period, more..., workspace); }, sum_kernel);
  return true;
}
