// The kernel of softmax's v10 and v13: a split row, held in the registers of a cluster. Terms:
// docs/glossary.md.
#pragma once

#include "register_row.cuh"

constexpr int CLUSTER_BLOCKS = 4;  // of HELD_THREADS on an SM, which bounds a thread to 64 registers

// Defeats common subexpression elimination (CSE) as keep_packed() does, but in ptxas as well, which would
// also keep the fp32 values: `none` is 0, but no compiler can know that.
template <typename T>
__device__ void hide(Pack<T>& pack, uint32_t none) {
  if (sizeof(T) == 4) return;
  pack.words = make_uint4(pack.words.x | none, pack.words.y | none, pack.words.z | none, pack.words.w | none);
}

// x: [M, N], rows stride_xm apart; out: [M, N]. A cluster of `blocks` blocks holds one row.
template <typename T, Form FORM, int PACKS, Skews SKEWS>
__device__ void softmax_of_cluster_row(const T* __restrict__ x, T* __restrict__ out, int N, int64_t stride_xm,
                                       int blocks) {
#if __CUDA_ARCH__ >= 900
  __shared__ WarpExchange<MaxSum> exchange;

  const int lane_id = threadIdx.x % 32, warps = blockDim.x / 32, parts = blocks * warps;
  const int64_t row = blockIdx.x;
  const T* const row_x = x + row * stride_xm;
  T* const row_out = out + row * N;
  HeldPart<T, PACKS> part{N, skew_of<LINE_BYTES>(SKEWS == Skews::DIFFER ? row_out : row_x),
                          static_cast<int>(blockIdx.y * warps + threadIdx.x / 32), lane_id};

  Pack<T> held[PACKS];
  load_part<SKEWS>(held, row_x, part, -INFINITY);
  const int single = part.single();
  T raw = from_float<T>(-INFINITY);
  if (single != part.NONE) raw = row_x[single];
  exchange.begin(parts);

  const float element = to_float(raw);
  exchange({lanes_merge(max_sum_of(held, element))}, part.own, blocks);

  // The pairs are read from shared memory twice, since there are no registers to keep them.
  MaxSum whole;
#pragma unroll
  for (int i = 0; i < MOST_HELD_PARTS / 32; ++i) {
    const int other = 32 * i + lane_id;
    if (other < parts) whole.max = fmaxf(whole.max, exchange.at(other).max);
  }
  whole.max = lanes_max(whole.max);
#pragma unroll
  for (int i = 0; i < MOST_HELD_PARTS / 32; ++i) {
    const int other = 32 * i + lane_id;
    if (other < parts) whole.sum += rescaled(exchange.at(other), whole.max);
  }
  whole.sum = lanes_sum(whole.sum);

  const uint32_t none = whole.sum < 0.0f;  // always 0, but only known after the exchange
  const ResultOf<T, FORM> result(whole);
  T* const first_out = row_out + part.first_of(0);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    hide(held[i], none);
    const Pack<T> results = results_of(held[i], result);
    // An explicit 16-byte store: the compiler would split a plain one into smaller stores.
    if (part.holds(i)) __stwb(reinterpret_cast<uint4*>(first_out + 32 * i * Pack<T>::SIZE), results.words);
  }
  if (single != part.NONE) row_out[single] = from_float<T>(result(element));
#endif
}

// Launches the kernel for rows of `packs` packs a thread. Returns false, without a launch, if no cluster
// holds a row, or if the GPU has no room for the cluster.
template <typename T, Skews SKEWS, typename Kernel>
bool launch_cluster_rows(const SoftmaxArgs& args, int packs, Kernel* kernel) {
  const int64_t most = SKEWS == Skews::DIFFER ? most_packs<T, LINE_BYTES>(args.out, args.N, args.N)
                                              : most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm);
  const HeldShape shape(most, packs);
  return launch_by_rows(args.M, shape, 0, args.stream, kernel, static_cast<const T*>(args.x),
                        static_cast<T*>(args.out), static_cast<int>(args.N), args.stride_xm, shape.blocks);
}
