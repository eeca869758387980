// matmul_fp32 v01_naive: one thread computes one element; neighbouring threads take neighbouring rows.
//
// Change:   none yet, this is where the ladder starts. A block of 32 x 32 threads computes 32 x 32 elements.
// Why:      the formula as it is written. The 32 lanes of a warp read 32 rows of a, one sector each, so most
//           of every sector fetched is thrown away, and nothing is reused but through the caches.
// Counter:  sectors_per_load is 16.5: 32 for a, 1 for b, which all lanes share.
// Requires: a and b of any strides, out row-major.
// Twin:     triton-kernels/matmul/matmul_fp32/v01_naive.py
#include "args.h"
#include "lib/common.cuh"

constexpr int BLOCK_M = 32;
constexpr int BLOCK_N = 32;

static_assert(BLOCK_M * BLOCK_N <= 1024, "one thread an element, and a block has 1024 at most");

__global__ void __launch_bounds__(BLOCK_M* BLOCK_N) matmul_fp32_v01_naive_kernel(MatmulFp32Args args) {
  // The grid is flat, since its y and z would end at 65535.
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t row = blockIdx.x / blocks_n * BLOCK_M + threadIdx.x;
  const int64_t col = blockIdx.x % blocks_n * BLOCK_N + threadIdx.y;
  if (row >= args.M || col >= args.N) return;

  const float* a = args.a + row * args.stride_am;  // [K]
  const float* b = args.b + col * args.stride_bn;  // [K]
  float sum = 0.0f;
  for (int64_t k = 0; k < args.K; ++k) sum += a[k * args.stride_ak] * b[k * args.stride_bk];
  args.out[row * args.N + col] = sum;
}

void matmul_fp32_v01_naive(const MatmulFp32Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  const dim3 threads(BLOCK_M, BLOCK_N);
  matmul_fp32_v01_naive_kernel<<<grid, threads, 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
}
