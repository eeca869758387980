// matmul_fp32 v09_pipelined: copies run in the background, and fragments are loaded one step ahead.
//
// Change:   cp.async fills a ring of STAGES tiles while earlier ones are multiplied, and a thread loads the
//           fragments of the next k before it multiplies those of this one. With no registers spent on data
//           in flight, the tile grows to 128 x 256 and a thread's share of it to 8 x 16.
// Why:      in v08 all warps wait for global memory once a tile and at two barriers, then for shared
//           memory. Now there is one barrier a tile, behind which the data lie already. An FMA issues in
//           every cycle at best, so each other instruction costs one: 8 x 16 sums need 6 loads for 128
//           FMAs, where 8 x 8 need 4 for 64.
// Counter:  fma_pipe and issue_active rise; occupancy falls, as a block fills an SM.
// Requires: compute capability 8.0 and 147 KiB of shared memory a block, which 8.0, 9.0 and 10.0 have and
//           8.6, 8.9 and 12.0 have not. a and b of any strides, out row-major; an operand is copied 16
//           bytes at a time where the tile's lines lie side by side and its size and alignment allow, else
//           4 bytes.
// Source:   the loop is that of CUTLASS, "Efficient GEMM in CUDA", section "Software Pipelining".
// Twin:     triton-kernels/matmul/matmul_fp32/v09_pipelined.py
#include "args.h"
#include "lib/common.cuh"
#include "lib/ptx/ampere.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 32;
constexpr int WARP_M = 64;
constexpr int WARP_N = 64;
constexpr int THREAD_M = 8;
constexpr int THREAD_N = 16;
constexpr int STAGES = 3;
constexpr int BLOCKS_PER_SM = 1;
constexpr int GROUP_M = 16;
constexpr int COPY_K = 8;
constexpr int PAD = 4;  // floats behind each row of a tile

constexpr int WARPS_N = BLOCK_N / WARP_N;
constexpr int THREADS = BLOCK_M / WARP_M * WARPS_N * 32;
constexpr int LANES_M = WARP_M / THREAD_M;
constexpr int LANES_N = WARP_N / THREAD_N;

static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "warps tile the block");
static_assert(THREAD_M % 4 == 0 && THREAD_N % 4 == 0, "fragments are read 16 bytes at a time");
static_assert(LANES_M * LANES_N == 32 && (LANES_M == 8 || LANES_N == 8), "lanes are 8 x 4 or 4 x 8");
static_assert(BLOCK_K % COPY_K == 0 && COPY_K % 2 == 0, "copies cover a tile, and fragments take turns");
static_assert(STAGES >= 3, "one stage is read, one may still arrive, and one is being filled");
static_assert(PAD % 8 == 4, "rows begin at multiples of 16 bytes, and 8 rows x 4 columns lie in 32 banks");

struct alignas(16) Stage {
  float a[BLOCK_K][BLOCK_M + PAD];  // transposed
  float b[BLOCK_K][BLOCK_N + PAD];
};

// One thread's share of the copies of an operand. A line is a row of a or a column of b; a tile holds BLOCK
// lines of depth BLOCK_K, k by k. All threads together copy ROWS values of k in a pass.
template <int BLOCK, bool VECTOR>
struct TileCopy {
  static constexpr int WIDTH = VECTOR ? 4 : 1;  // lines in one copy
  static constexpr int ROWS = VECTOR ? THREADS * WIDTH / BLOCK : 8;
  static constexpr int LINES = THREADS * WIDTH / ROWS;
  static constexpr int COPIES = BLOCK / LINES;  // of one thread in a pass
  static_assert(THREADS * WIDTH % ROWS == 0 && BLOCK % LINES == 0 && COPY_K % ROWS == 0,
                "passes cover the tile");

  const float* operand;  // [K, lines]
  const float* source[COPIES];
  int64_t stride_k;
  int row;     // of the first copy, in the tile
  int offset;  // of the first copy, from the beginning of the tile

  __device__ TileCopy(const float* operand, int64_t first_line, int64_t lines, int64_t stride,
                      int64_t stride_k)
      : operand(operand), stride_k(stride_k) {
    // Neighbouring threads go along the smaller stride: 32 lines, or 8 k of 4 lines, a whole sector each.
    const int thread = threadIdx.x;
    const bool along_k = !VECTOR && stride_k < stride;
    row = along_k ? thread % ROWS : thread / (LINES / WIDTH);
    const int line = along_k ? thread / ROWS : thread % (LINES / WIDTH) * WIDTH;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      // Past the edge the last lines are copied again, and the sums that they enter are not stored.
      source[i] = operand + min(first_line + line + i * LINES, lines - WIDTH) * stride + row * stride_k;
    }
    offset = row * (BLOCK + PAD) + line;
  }

  // Starts the copies of rows k to k + COPY_K of a tile, whose first `depth` rows exist; the others become
  // zeros. Each source moves on, so tiles are copied in order, from their first row to their last.
  __device__ void copy(float (*tile)[BLOCK + PAD], int k, int depth) {
#pragma unroll
    for (const int end = k + COPY_K; k < end; k += ROWS) {
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const bool valid = depth == BLOCK_K || k + row < depth;
        cp_async<4 * WIDTH>(tile[k] + offset + i * LINES, valid ? source[i] : operand, valid);
        source[i] += ROWS * stride_k;
        if (k + ROWS == BLOCK_K) source[i] -= (BLOCK_K - depth) * stride_k;
      }
    }
  }
};

// With STORE_VECTOR, rows of out begin at multiples of 16 bytes and N is a multiple of 4.
template <bool A_VECTOR, bool B_VECTOR>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_fp32_v09_pipelined_kernel(MatmulFp32Args args, bool store_vector) {
  extern __shared__ Stage stages[];  // [STAGES]

  // The grid is flat. Tiles are numbered down the columns of a group of GROUP_M tile rows, so that the blocks
  // that run at the same time cover a near-square patch of out.
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t group_row = blockIdx.x / (GROUP_M * blocks_n) * GROUP_M;
  const int64_t group_rows = min(cdiv(args.M, BLOCK_M) - group_row, int64_t{GROUP_M});
  const int64_t within = blockIdx.x % (GROUP_M * blocks_n);
  const int64_t block_row = (group_row + within % group_rows) * BLOCK_M;
  const int64_t block_col = within / group_rows * BLOCK_N;

  // Lanes l and l ^ 1 share their rows or columns, l and l ^ 2 the other of the two.
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const int lane_of_8 = lane_id / 2 % 8;
  const int lane_of_4 = lane_id / 16 * 2 + lane_id % 2;
  const int row = warp_id / WARPS_N * WARP_M + (LANES_M == 8 ? lane_of_8 : lane_of_4) * 4;
  const int col = warp_id % WARPS_N * WARP_N + (LANES_M == 8 ? lane_of_4 : lane_of_8) * 4;

  TileCopy<BLOCK_M, A_VECTOR> a_copy(args.a, block_row, args.M, args.stride_am, args.stride_ak);
  TileCopy<BLOCK_N, B_VECTOR> b_copy(args.b, block_col, args.N, args.stride_bn, args.stride_bk);

  // The first tile is the one that may be short, so that the main loop knows no edges.
  const int64_t tiles = cdiv(args.K, BLOCK_K);
  const int first_depth = static_cast<int>(args.K - (tiles - 1) * BLOCK_K);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (stage < tiles) {
      const int depth = stage == 0 ? first_depth : BLOCK_K;
#pragma unroll
      for (int k = 0; k < BLOCK_K; k += COPY_K) {
        a_copy.copy(stages[stage].a, k, depth);
        b_copy.copy(stages[stage].b, k, depth);
      }
    }
    cp_async_commit_group();  // a group for each tile, also where it is empty
  }

  alignas(16) float sums[THREAD_M][THREAD_N] = {};
  alignas(16) float a_fragment[2][THREAD_M];
  alignas(16) float b_fragment[2][THREAD_N];
  const auto load_fragments = [&](int buffer, const Stage& stage, int k) {
#pragma unroll
    for (int i = 0; i < THREAD_M; i += 4) {
      *reinterpret_cast<float4*>(&a_fragment[buffer][i]) =
          *reinterpret_cast<const float4*>(&stage.a[k][row + i * LANES_M]);
    }
#pragma unroll
    for (int j = 0; j < THREAD_N; j += 4) {
      *reinterpret_cast<float4*>(&b_fragment[buffer][j]) =
          *reinterpret_cast<const float4*>(&stage.b[k][col + j * LANES_N]);
    }
  };

  cp_async_wait_group<STAGES - 2>();  // for this thread's copies of the first tile
  __syncthreads();                    // for all threads' copies of it
  load_fragments(0, stages[0], 0);

  int read = 0;
  int write = STAGES - 1;
#pragma unroll 1
  for (int64_t left = tiles; left > 0; --left) {
#pragma unroll
    for (int k = 0; k < BLOCK_K; ++k) {
      if (k == BLOCK_K - 1) {
        cp_async_commit_group();
        cp_async_wait_group<STAGES - 2>();  // for this thread's copies of the next tile
        __syncthreads();  // for all threads' copies of it, and for all reads of this one, before it is
                          // refilled
        write = read;
        read = read == STAGES - 1 ? 0 : read + 1;
      }
      load_fragments((k + 1) % 2, stages[read], (k + 1) % BLOCK_K);
      // The copies of a later tile are spread over the loop, lest they hold up the loads of fragments.
      if (k % COPY_K == 0 && left >= STAGES) {
        a_copy.copy(stages[write].a, k, BLOCK_K);
        b_copy.copy(stages[write].b, k, BLOCK_K);
      }
      // Back and forth, so that an FMA shares one operand with the last: the register file, which delivers
      // two a cycle, is then asked for two.
#pragma unroll
      for (int j = 0; j < THREAD_N; ++j) {
#pragma unroll
        for (int step = 0; step < THREAD_M; ++step) {
          const int i = j % 2 == 0 ? step : THREAD_M - 1 - step;
          sums[i][j] += a_fragment[k % 2][i] * b_fragment[k % 2][j];
        }
      }
    }
  }

#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const int64_t out_row = block_row + row + i / 4 * 4 * LANES_M + i % 4;
    if (out_row >= args.M) continue;
#pragma unroll
    for (int j = 0; j < THREAD_N; j += 4) {
      const int64_t out_col = block_col + col + j * LANES_N;
      float* out = args.out + out_row * args.N + out_col;
      if (store_vector && out_col < args.N) {
        *reinterpret_cast<float4*>(out) = *reinterpret_cast<const float4*>(&sums[i][j]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (out_col + e < args.N) out[e] = sums[i][j + e];
        }
      }
    }
  }
}

void matmul_fp32_v09_pipelined(const MatmulFp32Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const auto vector = [](const float* operand, int64_t lines, int64_t stride, int64_t stride_k) {
    return stride == 1 && stride_k % 4 == 0 && lines % 4 == 0 && aligned_to_16_bytes(operand);
  };
  const bool a_vector = vector(args.a, args.M, args.stride_am, args.stride_ak);
  const bool b_vector = vector(args.b, args.N, args.stride_bn, args.stride_bk);
  const bool store_vector = args.N % 4 == 0 && aligned_to_16_bytes(args.out);
  const auto kernel = a_vector ? (b_vector ? matmul_fp32_v09_pipelined_kernel<true, true>
                                           : matmul_fp32_v09_pipelined_kernel<true, false>)
                               : (b_vector ? matmul_fp32_v09_pipelined_kernel<false, true>
                                           : matmul_fp32_v09_pipelined_kernel<false, false>);

  constexpr int SHARED_BYTES = STAGES * sizeof(Stage);
  allow_shared_memory(kernel, SHARED_BYTES);
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  kernel<<<grid, THREADS, SHARED_BYTES, args.stream>>>(args, store_vector);
  CUDA_CHECK(cudaGetLastError());
}
