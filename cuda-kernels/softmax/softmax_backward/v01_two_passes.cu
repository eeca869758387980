// softmax_backward v01_two_passes: a block reads its rows of dout and y twice.
//
// Change:   one pass sums dout * y (for the logarithm dout), one writes.
// Why:      the definition, word for word. The second pass finds both rows in L1, but loads one element at a
//           time, and the block waits for all of its warps between the passes.
// Counter:  dram_bytes are the least possible, but dram_share stays below what the memory can do.
// Requires: rows of contiguous elements, of any length.
// Source:   the derivative of softmax
// Twin:     triton-kernels/softmax/softmax_backward/v01_two_passes.py
#include "args.h"
#include "lib/common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// dout, y: [M, N], rows stride_dm and stride_ym apart; out: [M, N].
template <typename T>
__global__ void __launch_bounds__(THREADS)
    softmax_backward_v01_two_passes_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                           T* __restrict__ out, int64_t N, int64_t stride_dm,
                                           int64_t stride_ym, bool log) {
  __shared__ float parts[WARPS];
  const int64_t row = blockIdx.x;
  const T* row_dout = dout + row * stride_dm;
  const T* row_y = y + row * stride_ym;
  T* row_out = out + row * N;

  float sum = 0.0f;
  for (int64_t col = threadIdx.x; col < N; col += THREADS) {
    const float value = to_float(row_dout[col]);
    sum += log ? value : value * to_float(row_y[col]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();  // waits for every warp's part
  sum = 0.0f;
  for (int warp_id = 0; warp_id < WARPS; ++warp_id) sum += parts[warp_id];

  for (int64_t col = threadIdx.x; col < N; col += THREADS) {
    const float value = to_float(row_dout[col]), result = to_float(row_y[col]);
    row_out[col] = from_float<T>(log ? value - expf(result) * sum : result * (value - sum));
  }
}

}  // namespace

void softmax_backward_v01_two_passes(const SoftmaxBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_rows(args.M, [&](int64_t first, int64_t rows) {
      softmax_backward_v01_two_passes_kernel<<<rows, THREADS, 0, args.stream>>>(
          static_cast<const T*>(args.dout) + first * args.stride_dm,
          static_cast<const T*>(args.y) + first * args.stride_ym, static_cast<T*>(args.out) + first * args.N,
          args.N, args.stride_dm, args.stride_ym, args.log);
    });
  });
  CUDA_CHECK(cudaGetLastError());
}
