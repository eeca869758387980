// matmul_fp32 v05_register_tile_2d: each thread computes 8 x 8 elements.
//
// Change:   a thread reads 8 elements of a and 8 of b into registers and adds their outer product to its 64
//           sums. The tile grows to 128 x 128.
// Why:      16 loads from shared memory now serve 64 FMAs, where v04 needs 9 for 8. An element fetched from
//           global memory serves 128 FMAs instead of 64.
// Counter:  load_requests fall to a half again; instructions fall; fma_pipe rises.
// Requires: a and b of any strides, out row-major. Access is coalesced where the rows of a and b are
//           contiguous.
// Twin:     triton-kernels/matmul/matmul_fp32/v05_register_tile_2d.py
#include "args.h"
#include "lib/common.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 8;
constexpr int THREAD_M = 8;
constexpr int THREAD_N = 8;
constexpr int BLOCKS_PER_SM = 2;  // at least: while one waits, the other multiplies

constexpr int THREADS_M = BLOCK_M / THREAD_M;
constexpr int THREADS_N = BLOCK_N / THREAD_N;
constexpr int THREADS = THREADS_M * THREADS_N;
constexpr int A_ROWS = THREADS / BLOCK_K;  // of a_tile, fetched by all threads at once
constexpr int B_ROWS = THREADS / BLOCK_N;  // of b_tile, likewise

static_assert(BLOCK_M % THREAD_M == 0 && BLOCK_N % THREAD_N == 0, "threads tile the block");
static_assert(THREADS <= 1024, "a block has 1024 threads at most");
static_assert(THREADS % BLOCK_K == 0 && BLOCK_M % A_ROWS == 0, "each thread fetches as much of a_tile");
static_assert(THREADS % BLOCK_N == 0 && BLOCK_K % B_ROWS == 0, "each thread fetches as much of b_tile");

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_fp32_v05_register_tile_2d_kernel(MatmulFp32Args args) {
  __shared__ float a_tile[BLOCK_M][BLOCK_K];
  __shared__ float b_tile[BLOCK_K][BLOCK_N];

  // The grid is flat, since its y and z would end at 65535.
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t block_row = blockIdx.x / blocks_n * BLOCK_M;
  const int64_t block_col = blockIdx.x % blocks_n * BLOCK_N;

  // Of the tiles, this thread fetches these elements and those A_ROWS or B_ROWS further down. It computes
  // this element and those at distances of THREADS_M rows and THREADS_N columns, so that neighbouring threads
  // read neighbours of b_tile.
  const int a_row = threadIdx.x / BLOCK_K;
  const int a_k = threadIdx.x % BLOCK_K;
  const int b_k = threadIdx.x / BLOCK_N;
  const int b_col = threadIdx.x % BLOCK_N;
  const int row = threadIdx.x / THREADS_N;
  const int col = threadIdx.x % THREADS_N;

  const float* a = args.a + (block_row + a_row) * args.stride_am;  // [BLOCK_M - a_row, K]
  const float* b = args.b + (block_col + b_col) * args.stride_bn;  // [K]
  float sums[THREAD_M][THREAD_N] = {};
  for (int64_t k_begin = 0; k_begin < args.K; k_begin += BLOCK_K) {
    // Zeros past the edges: they add nothing, and every thread stays for the barriers.
#pragma unroll
    for (int i = 0; i < BLOCK_M; i += A_ROWS) {
      const bool a_inside = block_row + a_row + i < args.M && k_begin + a_k < args.K;
      a_tile[a_row + i][a_k] = a_inside ? a[i * args.stride_am + (k_begin + a_k) * args.stride_ak] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < BLOCK_K; k += B_ROWS) {
      const bool b_inside = block_col + b_col < args.N && k_begin + b_k + k < args.K;
      b_tile[b_k + k][b_col] = b_inside ? b[(k_begin + b_k + k) * args.stride_bk] : 0.0f;
    }
    __syncthreads();  // for both tiles to be complete
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      float a_fragment[THREAD_M];
      float b_fragment[THREAD_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) a_fragment[i] = a_tile[row + i * THREADS_M][k];
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) b_fragment[j] = b_tile[k][col + j * THREADS_N];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_N; ++j) sums[i][j] += a_fragment[i] * b_fragment[j];
      }
    }
    __syncthreads();  // for all reads, before the next tiles take the place of these
  }

#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const int64_t out_row = block_row + row + i * THREADS_M;
      const int64_t out_col = block_col + col + j * THREADS_N;
      if (out_row < args.M && out_col < args.N) args.out[out_row * args.N + out_col] = sums[i][j];
    }
  }
}

void matmul_fp32_v05_register_tile_2d(const MatmulFp32Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  matmul_fp32_v05_register_tile_2d_kernel<<<grid, THREADS, 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
}
