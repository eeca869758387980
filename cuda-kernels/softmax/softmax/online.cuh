// A row's maximum and its sum of exponentials, from those of its parts: Milakov and Gimelshein, "Online
// normalizer calculation for softmax", arXiv:1805.02867.
#pragma once

#include "lib/packs.cuh"

struct alignas(8) MaxSum {  // travels as one word
  float max = -INFINITY;
  float sum = 0.0f;  // of exp(x - origin(max))
};

// What exponents are taken from. A part that holds nothing but minus infinity adds nothing, where minus
// infinity minus itself would be NaN; a whole row of it gets its NaN when the result is written.
__device__ inline float origin(float max) { return max == -INFINITY ? 0.0f : max; }

// The sum as it is from a larger maximum.
__device__ inline float rescaled(MaxSum part, float max) { return part.sum * exp_of(part.max - origin(max)); }

// Of LANES neighbouring lanes; every one gets the result.
template <int LANES = 32>
__device__ MaxSum lanes_merge(MaxSum part) {
  const float max = lanes_max<LANES>(part.max);
  return {max, lanes_sum<LANES>(rescaled(part, max))};
}

// Of all threads of the block, of which there are whole warps; every one gets the result. `parts` are 32
// that no thread still reads.
__device__ inline MaxSum block_merge(MaxSum part, MaxSum* parts) {
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  part = lanes_merge(part);
  if (lane_id == 0) parts[warp_id] = part;
  __syncthreads();  // for every warp's part
  return lanes_merge(lane_id < blockDim.x / 32 ? parts[lane_id] : MaxSum{});
}

// What stands at x in the result, and in its logarithm.
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
