// cross_entropy v02_online: maximum and sum in one pass.
//
// Change:   a thread keeps the largest logit so far and the sum of exp(x - that). When a larger one comes,
//           the sum is scaled down by exp(old maximum - new one). Threads' pairs are merged the same way.
// Why:      half the traffic, as a row is read once. With one logit at a time, the second exponential and the
//           loads now take the time.
// Counter:  bytes_over_minimum falls to 1, and the time falls.
// Requires: rows of contiguous elements, of any length.
// Source:   Milakov and Gimelshein, arXiv:1805.02867, algorithm 3
// Twin:     triton-kernels/loss/cross_entropy/v02_online.py
#include "args.h"
#include "lib/common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

struct RowSums {
  float max, sum, total;
};

// The number that exponents are relative to: the maximum, or 0 if that is minus infinity, since minus
// infinity minus itself is NaN. A part of a row may hold nothing but minus infinity.
__device__ float origin(float max) { return max == -INFINITY ? 0.0f : max; }

__device__ RowSums merge(RowSums a, RowSums b) {
  const float max = fmaxf(a.max, b.max);
  const float sum = a.sum * expf(a.max - origin(max)) + b.sum * expf(b.max - origin(max));
  return {max, sum, a.total + b.total};
}

// logits: [M, N], rows stride_lm apart; target, losses, lse: [M].
template <typename T>
__global__ void __launch_bounds__(THREADS) cross_entropy_v02_online_kernel(const CrossEntropyArgs args) {
  __shared__ RowSums parts[WARPS];
  const int64_t row = blockIdx.x;
  const T* row_logits = static_cast<const T*>(args.logits) + row * args.stride_lm;
  const int64_t target = args.target[row];
  if (target == args.ignore_index) {
    if (threadIdx.x > 0) return;
    args.losses[row] = 0.0f;
    if (args.lse) args.lse[row] = 0.0f;
    return;
  }

  // The sum of the logits is computed for smoothing alone, as masked logits make it minus infinity.
  const bool smoothed = args.smoothing > 0.0f;
  RowSums mine = {-INFINITY, 0.0f, 0.0f};
  for (int64_t col = threadIdx.x; col < args.N; col += THREADS) {
    const float logit = to_float(row_logits[col]);
    mine = merge(mine, {logit, 1.0f, smoothed ? logit : 0.0f});
  }

#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine = merge(mine, {__shfl_xor_sync(0xffffffff, mine.max, distance),
                        __shfl_xor_sync(0xffffffff, mine.sum, distance),
                        __shfl_xor_sync(0xffffffff, mine.total, distance)});
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  __syncthreads();  // waits for every warp's part
  if (threadIdx.x > 0) return;
  for (int warp_id = 1; warp_id < WARPS; ++warp_id) mine = merge(mine, parts[warp_id]);

  const float log_sum = logf(mine.sum);
  const float logit = target >= 0 && target < args.N ? to_float(row_logits[target]) : NAN;
  float loss = log_sum + (1.0f - args.smoothing) * (mine.max - logit);
  if (smoothed) loss += args.smoothing * (mine.max - mine.total / static_cast<float>(args.N));
  args.losses[row] = loss;
  if (args.lse) args.lse[row] = mine.max + log_sum;
}

}  // namespace

void cross_entropy_v02_online(const CrossEntropyArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    cross_entropy_v02_online_kernel<T><<<static_cast<unsigned>(args.M), THREADS, 0, args.stream>>>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
