// The kernel of softmax's v10 and v13: a split row, held in the registers of a cluster. Terms:
// docs/glossary.md.
#pragma once

#include "args.h"
#include "lib/held.cuh"
#include "online.cuh"

// Defeats common subexpression elimination (CSE) as keep_packed() does, but in ptxas as well, which would
// also keep the fp32 values: `none` is 0, but no compiler can know that.
template <typename T>
__device__ void hide(Pack<T>& pack, uint32_t none) {
  if (sizeof(T) == 4) return;
  pack.words = make_uint4(pack.words.x | none, pack.words.y | none, pack.words.z | none, pack.words.w | none);
}

// x: [M, N], rows stride_xm apart; out: [M, N]. A cluster of `blocks` blocks holds one row.
template <typename T, bool LOG, int PACKS, Skews SKEWS = Skews::ALIKE>
__device__ void softmax_of_cluster_row(const T* __restrict__ x, T* __restrict__ out, int N, int64_t stride_xm,
                                       int blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE;
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
  float max = element;  // the thread's own, which its exponents are relative to
#pragma unroll
  for (int i = 0; i < PACKS; ++i) max = fmaxf(max, max_of(held[i]));
  float sum = exp_of(element - origin(max));
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    float pack_sum = 0.0f;  // a separate sum a pack: shorter chains of dependent additions
    keep_packed(held[i]);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) pack_sum += exp_of(float_of(held[i], j) - origin(max));
    sum += pack_sum;
  }
  exchange({lanes_merge(MaxSum{max, sum})}, part.own, blocks);

  // The pairs are read from shared memory twice, since there are no registers to keep them.
  MaxSum whole;
#pragma unroll
  for (int i = 0; i < MOST_PARTS / 32; ++i) {
    const int other = 32 * i + lane_id;
    if (other < parts) whole.max = fmaxf(whole.max, exchange.at(other).max);
  }
  whole.max = lanes_max(whole.max);
#pragma unroll
  for (int i = 0; i < MOST_PARTS / 32; ++i) {
    const int other = 32 * i + lane_id;
    if (other < parts) whole.sum += rescaled(exchange.at(other), whole.max);
  }
  whole.sum = lanes_sum(whole.sum);

  const uint32_t none = whole.sum < 0.0f;  // always 0, but only known after the exchange
  const std::conditional_t<LOG, LogSoftmax, Softmax> result(whole);
  T* const first_out = row_out + part.first_of(0);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    float values[SIZE];
    hide(held[i], none);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] = result(to_float(held[i][j]));  // float_of needs more registers
    Pack<T> results;
    round_to(results, values);
    // An explicit 16-byte store: the compiler would split a plain one into smaller stores.
    if (part.holds(i)) __stwb(reinterpret_cast<uint4*>(first_out + 32 * i * SIZE), results.words);
  }
  if (single != part.NONE) row_out[single] = from_float<T>(result(element));
#endif
}
