// The online softmax: a row's maximum and its sum of exponentials, merged from those of its parts. Milakov
// and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
#pragma once

#include "lib/packs.cuh"

struct alignas(8) MaxSum {  // 8 bytes, so that one store sends it
  float max = -INFINITY;
  float sum = 0.0f;  // of exp(x - origin(max))
};

// The number that exponents are relative to: the maximum, or 0 if that is minus infinity, since minus
// infinity minus itself is NaN and such a part must add 0. A row of nothing but minus infinity gets its NaN
// when the result is written.
__device__ inline float origin(float max) { return max == -INFINITY ? 0.0f : max; }

// The part's sum relative to a larger maximum.
__device__ inline float rescaled(MaxSum part, float max) { return part.sum * exp_of(part.max - origin(max)); }

// Merges the pairs of LANES neighbouring lanes; every lane gets the result. All 32 lanes must call.
template <int LANES = 32>
__device__ MaxSum lanes_merge(MaxSum part) {
  const float max = lanes_max<LANES>(part.max);
  return {max, lanes_sum<LANES>(rescaled(part, max))};
}

// Merges the pairs of all threads of the block, which must be whole warps; every thread gets the result.
// `parts`: 32 pairs in shared memory that no thread still reads.
__device__ inline MaxSum block_merge(MaxSum part, MaxSum* parts) {
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  part = lanes_merge(part);
  if (lane_id == 0) parts[warp_id] = part;
  __syncthreads();  // waits for every warp's pair
  return lanes_merge(lane_id < blockDim.x / 32 ? parts[lane_id] : MaxSum{});
}

// The result for the element x, given the row's pair: softmax and its logarithm.
struct Softmax {
  float max, scale;
  __device__ explicit Softmax(MaxSum row) : max(row.max), scale(1.0f / row.sum) {}
  __device__ float operator()(float x) const { return exp_of(x - max) * scale; }
};
struct LogSoftmax {
  float max, log_sum;
  __device__ explicit LogSoftmax(MaxSum row) : max(row.max), log_sum(logf(row.sum)) {}
  __device__ float operator()(float x) const { return x - max - log_sum; }
};
