// softmax v02_online: maximum and sum in one pass.
//
// Change:   a thread keeps the largest element so far and the sum of exp(x - that). When a larger one comes,
//           the sum is scaled down by exp(old maximum - new one). Threads' pairs are merged the same way.
// Why:      one pass fewer over the row and one wait fewer for the block, at the price of one more
//           exponential for each element.
// Counter:  load_requests fall by a third; instructions rise, and may cost more time than the pass saves.
// Requires: rows of contiguous elements, of any length.
// Source:   Milakov and Gimelshein, arXiv:1805.02867, algorithm 3
// Twin:     triton-kernels/softmax/softmax/v02_online.py
#include "args.h"
#include "lib/common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

struct MaxSum {
  float max, sum;
};

// The number that exponents are relative to: the maximum, or 0 if that is minus infinity, since minus
// infinity minus itself is NaN. A part of a row may hold nothing but minus infinity; a whole row of it gets
// its NaN when the result is written.
__device__ float origin(float max) { return max == -INFINITY ? 0.0f : max; }

__device__ MaxSum merge(MaxSum a, MaxSum b) {
  const float max = fmaxf(a.max, b.max);
  return {max, a.sum * expf(a.max - origin(max)) + b.sum * expf(b.max - origin(max))};
}

// x: [M, N], rows stride_xm apart; out: [M, N].
template <typename T>
__global__ void __launch_bounds__(THREADS)
    softmax_v02_online_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t N, int64_t stride_xm,
                              bool log) {
  __shared__ MaxSum parts[WARPS];
  const int64_t row = blockIdx.x;
  const T* row_x = x + row * stride_xm;
  T* row_out = out + row * N;

  MaxSum mine = {-INFINITY, 0.0f};
  for (int64_t col = threadIdx.x; col < N; col += THREADS) mine = merge(mine, {to_float(row_x[col]), 1.0f});

#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine = merge(mine, {__shfl_xor_sync(0xffffffff, mine.max, distance),
                        __shfl_xor_sync(0xffffffff, mine.sum, distance)});
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  __syncthreads();  // waits for every warp's part
  mine = parts[0];
  for (int warp_id = 1; warp_id < WARPS; ++warp_id) mine = merge(mine, parts[warp_id]);

  const float log_sum = logf(mine.sum);
  for (int64_t col = threadIdx.x; col < N; col += THREADS) {
    const float distance = to_float(row_x[col]) - mine.max;
    row_out[col] = from_float<T>(log ? distance - log_sum : expf(distance) / mine.sum);
  }
}

}  // namespace

void softmax_v02_online(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_rows(args.M, [&](int64_t first, int64_t rows) {
      softmax_v02_online_kernel<<<rows, THREADS, 0, args.stream>>>(
          static_cast<const T*>(args.x) + first * args.stride_xm, static_cast<T*>(args.out) + first * args.N,
          args.N, args.stride_xm, args.log);
    });
  });
  CUDA_CHECK(cudaGetLastError());
}
