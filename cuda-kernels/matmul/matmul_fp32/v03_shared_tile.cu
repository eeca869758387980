// matmul_fp32 v03_shared_tile: tiles of a and b are staged in shared memory and used by the whole block.
//
// Change:   the block walks along K in tiles of 32; each thread fetches one element of either tile and then
//           reads a row of the one and a column of the other from shared memory.
// Why:      each element fetched serves a whole row or column of the tile, so global traffic falls by the
//           tile's width; what remains is one shared-memory load for nearly every FMA.
// Counter:  load_requests falls to a thirty-second; fma_pipe stays low.
// Requires: a and b of any strides, out row-major. Access is coalesced where the rows of a and b are
//           contiguous.
// Twin:     triton-kernels/matmul/matmul_fp32/v03_shared_tile.py
#include "args.h"
#include "lib/common.cuh"

constexpr int BLOCK_M = 32;
constexpr int BLOCK_N = 32;
constexpr int BLOCK_K = 32;

static_assert(BLOCK_M * BLOCK_N <= 1024, "one thread an element, and a block has 1024 at most");
static_assert(BLOCK_K == BLOCK_M && BLOCK_K == BLOCK_N, "each thread fetches one element of either tile");

__global__ void __launch_bounds__(BLOCK_M* BLOCK_N) matmul_fp32_v03_shared_tile_kernel(MatmulFp32Args args) {
  // A warp reads one element of a_tile, which all lanes share, and one row of b_tile: no bank is asked twice.
  __shared__ float a_tile[BLOCK_M][BLOCK_K];
  __shared__ float b_tile[BLOCK_K][BLOCK_N];

  // The grid is flat, since its y and z would end at 65535.
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t row = blockIdx.x / blocks_n * BLOCK_M + threadIdx.y;
  const int64_t col = blockIdx.x % blocks_n * BLOCK_N + threadIdx.x;

  const float* a = args.a + row * args.stride_am;  // [K]
  const float* b = args.b + col * args.stride_bn;  // [K]
  float sum = 0.0f;
  for (int64_t k_begin = 0; k_begin < args.K; k_begin += BLOCK_K) {
    // Zeros past the edges: they add nothing, and every thread stays for the barriers.
    const int64_t a_k = k_begin + threadIdx.x;
    const int64_t b_k = k_begin + threadIdx.y;
    a_tile[threadIdx.y][threadIdx.x] = row < args.M && a_k < args.K ? a[a_k * args.stride_ak] : 0.0f;
    b_tile[threadIdx.y][threadIdx.x] = col < args.N && b_k < args.K ? b[b_k * args.stride_bk] : 0.0f;
    __syncthreads();  // for both tiles to be complete
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) sum += a_tile[threadIdx.y][k] * b_tile[k][threadIdx.x];
    __syncthreads();  // for all reads, before the next tiles take the place of these
  }
  if (row < args.M && col < args.N) args.out[row * args.N + col] = sum;
}

void matmul_fp32_v03_shared_tile(const MatmulFp32Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  const dim3 threads(BLOCK_N, BLOCK_M);
  matmul_fp32_v03_shared_tile_kernel<<<grid, threads, 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
}
