// matmul_fp32 v02_coalesced: neighbouring threads take neighbouring columns.
//
// Change:   the lanes of a warp run along a row of out instead of down a column.
// Why:      a warp now reads one element of a, which all lanes share, and 32 neighbours of b: four sectors.
// Counter:  sectors_per_load falls from 16.5 to 2.5; time follows.
// Requires: a and b of any strides, out row-major. Access is coalesced where b's rows are contiguous.
// Twin:     none, Triton's compiler lays lanes along the contiguous dimension by itself.
#include "args.h"
#include "lib/common.cuh"

constexpr int BLOCK_M = 32;
constexpr int BLOCK_N = 32;

static_assert(BLOCK_M * BLOCK_N <= 1024, "one thread an element, and a block has 1024 at most");

__global__ void __launch_bounds__(BLOCK_M* BLOCK_N) matmul_fp32_v02_coalesced_kernel(MatmulFp32Args args) {
  // The grid is flat, since its y and z would end at 65535.
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t row = blockIdx.x / blocks_n * BLOCK_M + threadIdx.y;
  const int64_t col = blockIdx.x % blocks_n * BLOCK_N + threadIdx.x;
  if (row >= args.M || col >= args.N) return;

  const float* a = args.a + row * args.stride_am;  // [K]
  const float* b = args.b + col * args.stride_bn;  // [K]
  float sum = 0.0f;
  for (int64_t k = 0; k < args.K; ++k) sum += a[k * args.stride_ak] * b[k * args.stride_bk];
  args.out[row * args.N + col] = sum;
}

void matmul_fp32_v02_coalesced(const MatmulFp32Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  const dim3 threads(BLOCK_N, BLOCK_M);
  matmul_fp32_v02_coalesced_kernel<<<grid, threads, 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
}
