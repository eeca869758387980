// Device code of the norms' backward kernels. With g = dout * weight and unit = (x - mean) * rstd:
//
//   dx = rstd * (g - mean(g) - unit * mean(g * unit)),  dweight = sum(dout * unit),  dbias = sum(dout)
//
// with means over a row's N elements, sums over the M rows. Without CENTERED (rms_norm) mean(g) is left out.
#pragma once

#include <algorithm>

#include "lib/partial_sums.cuh"
#include "norm_args.h"
#include "norm_parts.cuh"

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

// A register-resident row of x and dout. Packs are those of memory for x.
template <typename T, int PACKS>
struct HeldRows {
  Pack<T> x[PACKS], dout[PACKS];

  // Issues the loads of rows of n elements; finish_load waits for them. The skew of dout's row may differ
  // from x's.
  template <bool WHOLE, typename First>
  __device__ void load(const T* row_x, const T* row_dout, int n, First first_of) {
    load_touching_packs(x, row_x, n, first_of);
    if (WHOLE || skew_of(row_dout) == skew_of(row_x)) {
      load_touching_packs(dout, row_dout, n, first_of);
    } else {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) dout[i] = load_ragged(row_dout, first_of(i), n, 0.0f);
    }
  }
  template <bool WHOLE, typename First>
  __device__ void finish_load(int n, First first_of) {
    if constexpr (!WHOLE) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        mask_beside(x[i], first_of(i), n);
        mask_beside(dout[i], first_of(i), n);
      }
    }
  }
};

// In place of a pack of weights: ones.
struct NoWeights {
  __device__ float operator[](int) const { return 1.0f; }
};

// The columns of one of `threads` threads that share rows of n elements, and its sums over these rows for
// dweight and dbias. All rows must have the same skew, so that the thread's columns stay the same. WHOLE:
// every row is whole packs, and dx and dadded are aligned like x.
template <typename T, int PACKS, bool CENTERED, bool WHOLE>
struct GradientColumns {
  static constexpr int SIZE = Pack<T>::SIZE;
  int n, skew, thread, threads;
  float dweight[PACKS][SIZE] = {}, dbias[CENTERED ? PACKS : 1][CENTERED ? SIZE : 1] = {};

  __device__ GradientColumns(int n, int skew, int thread, int threads)
      : n(n), skew(WHOLE ? 0 : skew), thread(thread), threads(threads) {}

  __device__ int first_of(int i) const { return (i * threads + thread) * SIZE - skew; }

  // Adds a row to the columns' sums, and returns the row's sums over this thread's elements; `product` lacks
  // its factor rstd. weight_of(i) returns a pack of weights, or NoWeights.
  template <typename WeightOf>
  __device__ GradientSums add(HeldRows<T, PACKS>& row, float mean, float rstd, WeightOf weight_of) {
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

  // The i-th pack of dx. `means` are the whole row's sums divided by N; `added` is a pack of dadded.
  template <typename Weights>
  __device__ Pack<T> result(const HeldRows<T, PACKS>& row, int i, float mean, float rstd, GradientSums means,
                            const Weights& weights, const Pack<T>& added) const {
    const float of_distance = -means.product * rstd * rstd * rstd, of_all = -means.plain * rstd;
    Pack<T> results;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      const float distance = CENTERED ? to_float(row.x[i][j]) - mean : to_float(row.x[i][j]);
      const float rest = fmaf(distance, of_distance, of_all + to_float(added[j]));
      set(results, j, from_float<T>(fmaf(to_float(row.dout[i][j]) * rstd, to_float(weights[j]), rest)));
    }
    return results;
  }

  // Writes dx. weight_of(i) and added_of(i, first) return packs of weights and of dadded.
  template <typename WeightOf, typename AddedOf>
  __device__ void write(const HeldRows<T, PACKS>& row, T* dx, float mean, float rstd, GradientSums means,
                        WeightOf weight_of, AddedOf added_of) const {
    const bool aligned = WHOLE || skew_of(dx) == skew;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int first = first_of(i);
      if (first >= n) break;
      const Pack<T> results = result(row, i, mean, rstd, means, weight_of(i), added_of(i, first));
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

// Loads a pack of dadded; zeros if there is none.
template <bool WHOLE, typename T>
__device__ Pack<T> load_added(const T* added, int first, int n) {
  if (added == nullptr) return {};
  if (WHOLE) return {__ldcg(reinterpret_cast<const uint4*>(added + first))};
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

// Shares of M rows by skew. Rows that lie a multiple of `period` apart have the same skew: they are of one
// kind. With several kinds, rows are ordered by kind, and clusters get equal shares of that order, so that
// most have rows of one kind. With one kind, a cluster takes every row whose index is its own modulo the
// number of clusters.
struct RowKinds {
  int64_t M;
  int period;

  __device__ int64_t start(int kind) const { return kind * (M / period) + min(int64_t{kind}, M % period); }
  __device__ int kind(int64_t place) const {
    const int64_t few = M / period, more = M % period;  // the first `more` kinds have a row more
    if (place < start(more)) return static_cast<int>(place / (few + 1));
    return few ? static_cast<int>(min(more + (place - start(more)) / few, int64_t{period - 1})) : period - 1;
  }
};

// Persistent clusters of `blocks` blocks over split rows. A block holds at most blockDim.x * PACKS packs of
// each row in registers, and the weights of its columns in shared memory. A cluster leaves one set of partial
// sums for every kind of rows in its share.
template <typename T, int PACKS, bool CENTERED, bool WHOLE, bool PREFETCH>
__device__ void backward_by_cluster(const NormBackwardArgs& args, int period, int blocks, int each,
                                    float* workspace) {
  extern __shared__ uint4 weights[];  // [PACKS, blockDim.x], every thread's own
  __shared__ Exchange<GradientSums> exchange;
  __shared__ GradientSums warps[2][32];
  const int N = static_cast<int>(args.N);
  const int rank = rank_in_cluster(blocks);
  const int cluster = blockIdx.x / blocks, clusters = gridDim.x / blocks;
  const RowKinds kinds{args.M, WHOLE ? 1 : period};
  const auto share = [&](int of) { return args.M * of / clusters; };  // begins where the one before ends
  const int first_kind = kinds.kind(share(cluster)), last_kind = kinds.kind(share(cluster + 1));
  if (blocks > 1) exchange.begin();

  uint32_t turn = 0;
  for (int kind = first_kind; kind <= last_kind; ++kind) {
    // The rows are index, index + step, ... below `limit`.
    const auto row_at = [&](int64_t place) { return kind + (place - kinds.start(kind)) * kinds.period; };
    const int step = kinds.period > 1 ? kinds.period : clusters;
    int64_t index = cluster, limit = args.M;
    if (kinds.period > 1) {
      index = row_at(max(share(cluster), kinds.start(kind)));
      limit = row_at(min(share(cluster + 1), kinds.start(kind + 1)));
    }
    const T* x = static_cast<const T*>(args.x);
    const Parts<T> parts{N, skew_of(x + kind * args.stride_xm), each};
    const int start = parts.start(rank), n = parts.count(rank);
    x += start;
    const T* dout = static_cast<const T*>(args.dout) + start;
    GradientColumns<T, PACKS, CENTERED, WHOLE> columns(n, skew_of(x + kind * args.stride_xm), threadIdx.x,
                                                       blockDim.x);
    const auto first_of = [&](int i) { return columns.first_of(i); };
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      weights[i * blockDim.x + threadIdx.x] = load_weights<T>(args.weight, start, first_of(i), n).words;
    }
    const auto weight_of = [&](int i) { return Pack<T>{weights[i * blockDim.x + threadIdx.x]}; };

    HeldRows<T, PACKS> row, next;
    float next_mean = 0.0f, next_rstd = 0.0f;
    const auto load = [&](HeldRows<T, PACKS>& rows, int64_t at) {
      if (at >= limit) return;
      rows.template load<WHOLE>(x + at * args.stride_xm, dout + at * args.stride_dm, n, first_of);
      if (CENTERED) next_mean = args.mean[at];
      next_rstd = args.rstd[at];
    };
    if (PREFETCH) load(next, index);
    if (blocks > 1 && kind == first_kind) exchange.wait_for_all();

    for (; index < limit; index += step, ++turn) {
      if (!PREFETCH) load(row, index);
      const float mean = next_mean, rstd = next_rstd;
      if (PREFETCH) {
        row = next;
        load(next, index + step);
      }
      row.template finish_load<WHOLE>(n, first_of);
      GradientSums sums = block_sum(columns.add(row, mean, rstd, weight_of), warps[turn % 2]);
      if (blocks > 1) sums = lanes_sum(exchange(sums, rank, blocks, turn));
      const T* added = static_cast<const T*>(args.dadded) + index * args.stride_am + start;
      columns.write(
          row, static_cast<T*>(args.dx) + index * args.N + start, mean, rstd,
          {sums.product / static_cast<float>(N), sums.plain / static_cast<float>(N)}, weight_of,
          [&](int, int first) { return load_added<WHOLE>(args.dadded ? added : nullptr, first, n); });
    }
    if (workspace == nullptr) continue;
    // cluster + kind numbers the sets of partial sums: the next share starts with this one's last kind or the
    // one after it, so no number comes twice.
    const int group = cluster + kind, groups = clusters + kinds.period - 1;
    columns.for_each([&](int col, float of_weight, float of_bias) {
      partial_sums(workspace, 0, groups, args.N, group)[start + col] = of_weight;
      if (CENTERED) partial_sums(workspace, 1, groups, args.N, group)[start + col] = of_bias;
    });
  }
}

// Whether the WHOLE kernels apply: in every matrix all rows start at multiples of 16 bytes and are whole
// packs.
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

inline bool wants_sums(const NormBackwardArgs& args) { return args.dweight || args.dbias; }

inline float* workspace_of(const NormBackwardArgs& args, int groups, int outputs) {
  if (!wants_sums(args)) return nullptr;
  return static_cast<float*>(
      args.memory->workspace(static_cast<size_t>(outputs) * groups * args.N * sizeof(float)));
}

// Calls launch(workspace), which launches a step's kernel that leaves `groups` sets of partial sums; then
// launches sum_kernel, which adds them.
template <typename T, typename Launch>
void launch_with_sums(const NormBackwardArgs& args, int groups, bool centered, Launch launch,
                      void (*sum_kernel)(const float*, int, int64_t, T*, T*)) {
  const int outputs = centered ? 2 : 1;
  float* const workspace = workspace_of(args, groups, outputs);
  if (groups > 0) launch(workspace);
  if (!wants_sums(args)) return;
  const dim3 grid(static_cast<unsigned>(cdiv(args.N, SUM_COLUMNS)), outputs);
  sum_kernel<<<grid, SUM_COLUMNS * SUM_GROUPS, 0, args.stream>>>(
      workspace, groups, args.N, static_cast<T*>(args.dweight), static_cast<T*>(args.dbias));
}

// Launches kernel(args, period, blocks, each, workspace), in which a block has at most threads * packs packs
// of a row, and then sum_kernel. False if the GPU has no room for the cluster.
template <typename T, typename Kernel>
bool launch_parts(const NormBackwardArgs& args, Kernel* kernel, int blocks, int packs, bool centered,
                  void (*sum_kernel)(const float*, int, int64_t, T*, T*)) {
  const int each = static_cast<int>(cdiv(packs_of<T>(args), blocks));
  const int threads = static_cast<int>(cdiv(cdiv(each, packs), 32) * 32);
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), blocks, threads,
                       threads * packs * static_cast<int>(sizeof(uint4)), args.stream);
  const int period = skew_period<T>(args.stride_xm);
  const int clusters = static_cast<int>(std::min<int64_t>(args.M, launch.resident()));
  if (clusters == 0) return false;
  launch_with_sums<T>(
      args, clusters + period - 1, centered,
      [&](float* workspace) { launch(clusters, kernel, args, period, blocks, each, workspace); }, sum_kernel);
  return true;
}
