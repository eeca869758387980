// matmul_fp32 v04_register_tile_1d: each thread computes 8 elements of a column.
//
// Change:   a thread keeps 8 sums in registers, one below the other. The tile grows to 64 x 64 with as many
//           results a thread, and becomes 8 deep, so that each thread still fetches one element of a and b.
// Why:      one element of b from shared memory now serves 8 FMAs: v03 loads two operands for an FMA, this
//           step 9 for 8. Twice the tile's width also means half the traffic from global memory.
// Counter:  load_requests fall to a half; instructions fall; fma_pipe rises.
// Requires: a and b of any strides, out row-major. Access is coalesced where the rows of a and b are
//           contiguous.
// Twin:     none, Triton's compiler shares out the results of tl.dot by itself.
#include "args.h"
#include "lib/common.cuh"

constexpr int BLOCK_M = 64;
constexpr int BLOCK_N = 64;
constexpr int BLOCK_K = 8;
constexpr int THREAD_M = 8;
constexpr int BLOCKS_PER_SM = 2;  // at least: while one waits, the other multiplies

constexpr int THREADS = BLOCK_M * BLOCK_N / THREAD_M;

static_assert(BLOCK_M % THREAD_M == 0 && BLOCK_N % 32 == 0, "a warp takes THREAD_M whole rows");
static_assert(THREADS <= 1024, "a block has 1024 threads at most");
static_assert(THREADS == BLOCK_M * BLOCK_K && THREADS == BLOCK_K * BLOCK_N,
              "each thread fetches one element of either tile");

__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_fp32_v04_register_tile_1d_kernel(MatmulFp32Args args) {
  // A warp reads one element of a_tile, which all lanes share, and 32 neighbours of b_tile: no bank is asked
  // twice.
  __shared__ float a_tile[BLOCK_M][BLOCK_K];
  __shared__ float b_tile[BLOCK_K][BLOCK_N];

  // The grid is flat, since its y and z would end at 65535.
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t block_row = blockIdx.x / blocks_n * BLOCK_M;
  const int64_t block_col = blockIdx.x % blocks_n * BLOCK_N;

  // Of the tiles, this thread fetches these elements, and computes THREAD_M rows of one column.
  const int a_row = threadIdx.x / BLOCK_K;
  const int a_k = threadIdx.x % BLOCK_K;
  const int b_k = threadIdx.x / BLOCK_N;
  const int b_col = threadIdx.x % BLOCK_N;
  const int row = threadIdx.x / BLOCK_N * THREAD_M;
  const int col = threadIdx.x % BLOCK_N;

  const float* a = args.a + (block_row + a_row) * args.stride_am;  // [K]
  const float* b = args.b + (block_col + b_col) * args.stride_bn;  // [K]
  float sums[THREAD_M] = {};
  for (int64_t k_begin = 0; k_begin < args.K; k_begin += BLOCK_K) {
    // Zeros past the edges: they add nothing, and every thread stays for the barriers.
    const bool a_inside = block_row + a_row < args.M && k_begin + a_k < args.K;
    const bool b_inside = block_col + b_col < args.N && k_begin + b_k < args.K;
    a_tile[a_row][a_k] = a_inside ? a[(k_begin + a_k) * args.stride_ak] : 0.0f;
    b_tile[b_k][b_col] = b_inside ? b[(k_begin + b_k) * args.stride_bk] : 0.0f;
    __syncthreads();  // for both tiles to be complete
#pragma unroll 4      // all 8 at once would take more registers than two blocks have
    for (int k = 0; k < BLOCK_K; ++k) {
      const float b_element = b_tile[k][col];
#pragma unroll
      for (int i = 0; i < THREAD_M; ++i) sums[i] += a_tile[row + i][k] * b_element;
    }
    __syncthreads();  // for all reads, before the next tiles take the place of these
  }

#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const int64_t out_row = block_row + row + i;
    const int64_t out_col = block_col + col;
    if (out_row < args.M && out_col < args.N) args.out[out_row * args.N + out_col] = sums[i];
  }
}

void matmul_fp32_v04_register_tile_1d(const MatmulFp32Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  matmul_fp32_v04_register_tile_1d_kernel<<<grid, THREADS, 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
}
