// softmax v01_three_passes: a block reads its row three times.
//
// Change:   one pass finds the maximum, one sums the exponentials of the distances from it, one writes.
// Why:      the definition, word for word. Without the maximum, exp(89) would overflow in fp32.
// Counter:  dram_share stays low, although dram_bytes are the least possible: a row of 4096 stays in L1
//           between the passes. Each thread waits for one element at a time, and the block for its slowest
//           warp after every pass.
// Requires: rows of contiguous elements, of any length.
// Source:   the "safe softmax" of arXiv:1805.02867, algorithm 2
// Twin:     triton-kernels/softmax/softmax/v01_three_passes.py
#include "args.h"
#include "lib/common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Combines the values of all threads of the block; every thread gets the result.
template <typename Combine>
__device__ float block_reduce(float value, float* parts, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffff, value, distance));
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();  // waits for every warp's part
  value = parts[0];
  for (int warp_id = 1; warp_id < WARPS; ++warp_id) value = combine(value, parts[warp_id]);
  return value;
}

// x: [M, N], rows stride_xm apart; out: [M, N].
template <typename T>
__global__ void __launch_bounds__(THREADS)
    softmax_v01_three_passes_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t N,
                                    int64_t stride_xm, bool log) {
  __shared__ float max_parts[WARPS];
  __shared__ float sum_parts[WARPS];
  const int64_t row = blockIdx.x;
  const T* row_x = x + row * stride_xm;
  T* row_out = out + row * N;

  float max = -INFINITY;
  for (int64_t col = threadIdx.x; col < N; col += THREADS) max = fmaxf(max, to_float(row_x[col]));
  max = block_reduce(max, max_parts, [](float a, float b) { return fmaxf(a, b); });

  float sum = 0.0f;
  for (int64_t col = threadIdx.x; col < N; col += THREADS) sum += expf(to_float(row_x[col]) - max);
  sum = block_reduce(sum, sum_parts, [](float a, float b) { return a + b; });

  // A row of nothing but minus infinity becomes NaN here, as in PyTorch.
  const float log_sum = logf(sum);
  for (int64_t col = threadIdx.x; col < N; col += THREADS) {
    const float distance = to_float(row_x[col]) - max;
    row_out[col] = from_float<T>(log ? distance - log_sum : expf(distance) / sum);
  }
}

}  // namespace

void softmax_v01_three_passes(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_rows(args.M, [&](int64_t first, int64_t rows) {
      softmax_v01_three_passes_kernel<<<rows, THREADS, 0, args.stream>>>(
          static_cast<const T*>(args.x) + first * args.stride_xm, static_cast<T*>(args.out) + first * args.N,
          args.N, args.stride_xm, args.log);
    });
  });
  CUDA_CHECK(cudaGetLastError());
}
