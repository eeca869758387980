// matmul_tf32x3 v02_lean_split: fewer instructions beside the products.
//
// Change:   small is not rounded any more, as mma.sync ignores what TF32 does not hold; and the sums of the
//           tensor cores are added to the running ones only every CHUNK_K of K.
// Why:      beside the 24 mma of a step of 8, a warp issued 48 instructions to split and 32 to add. Now it is
//           32 and, on average, 8. Within a chunk the sums are small and the roundings toward zero few, so
//           the error stays.
// Counter:  instructions, time and the error fall.
// Requires: compute capability 8.0. a and b of any strides, out row-major. Infinities and NaNs come out as in
//           fp32. An operand below 2^-114 keeps fewer bits, since its small part ends at 2^-136, TF32's
//           smallest number; TF32's own 11 bits are left at 2^-126.
// Twin:     triton-kernels/matmul/matmul_tf32x3/v02_lean_split.py
#include "args.h"
#include "lib/common.cuh"
#include "lib/ptx/ampere.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 64;
constexpr int BLOCK_K = 32;
constexpr int WARP_M = 32;
constexpr int WARP_N = 32;
constexpr int CHUNK_K = 32;

constexpr int WARPS_N = BLOCK_N / WARP_N;
constexpr int THREADS = BLOCK_M / WARP_M * WARPS_N * 32;
constexpr int TILES_M = WARP_M / 16;  // tiles of one mma in a warp's tile
constexpr int TILES_N = WARP_N / 8;

// Rows of the shared tiles, padded: a fragment's lanes (g, t) read a_tile[g][t] or b_tile[t][g], and with 4
// or 8 banks from row to row the 32 lanes meet 32 different banks.
constexpr int PITCH_A = BLOCK_K + 4;
constexpr int PITCH_B = BLOCK_N + 8;

static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "warps divide the block's tile");
static_assert(WARP_M % 16 == 0 && WARP_N % 8 == 0 && BLOCK_K % 8 == 0, "m16n8k8 divides a warp's tile");
static_assert(BLOCK_K % CHUNK_K == 0 && CHUNK_K % 8 == 0, "chunks divide the block's tile");
static_assert(BLOCK_M * BLOCK_K % THREADS == 0 && BLOCK_K * BLOCK_N % THREADS == 0,
              "threads share the copying");
static_assert(PITCH_A % 32 == 4 && PITCH_B % 32 == 8, "see above");

// Fills a tile from the matrix that goes on for `rows` and `cols` from source. Zeros past its edges: they add
// nothing, and every thread stays for the barriers. Neighbouring threads take neighbouring columns.
template <int COLS, int ROWS, int PITCH>
__device__ inline void load_tile(float (&tile)[ROWS][PITCH], const float* source, int64_t stride_row,
                                 int64_t stride_col, int64_t rows, int64_t cols) {
  const int col = threadIdx.x % COLS;
  source += threadIdx.x / COLS * stride_row + col * stride_col;
#pragma unroll 4
  for (int i = 0; i < ROWS * COLS / THREADS; ++i, source += THREADS / COLS * stride_row) {
    const int row = i * (THREADS / COLS) + threadIdx.x / COLS;
    tile[row][col] = row < rows && col < cols ? *source : 0.0f;
  }
}

// x = big + small but for its last bit. The subtraction is exact, and leaves at most 13 bits.
__device__ inline void split(float x, uint32_t& big, uint32_t& small) {
  big = to_tf32(x);
  small = __float_as_uint(x - __uint_as_float(big));
}

// One element by the formula, in fp32 alone.
__device__ inline float plain_sum(const MatmulTf32x3Args& args, int64_t row, int64_t col) {
  const float* a = args.a + row * args.stride_am;  // [K]
  const float* b = args.b + col * args.stride_bn;  // [K]
  float sum = 0.0f;
  for (int64_t k = 0; k < args.K; ++k) sum += a[k * args.stride_ak] * b[k * args.stride_bk];
  return sum;
}

__global__ void __launch_bounds__(THREADS, 2) matmul_tf32x3_v02_lean_split_kernel(MatmulTf32x3Args args) {
  __shared__ float a_tile[BLOCK_M][PITCH_A];
  __shared__ float b_tile[BLOCK_K][PITCH_B];

  // The grid is flat, since its y and z would end at 65535.
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t block_row = blockIdx.x / blocks_n * BLOCK_M;
  const int64_t block_col = blockIdx.x % blocks_n * BLOCK_N;
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const int g = lane_id / 4;  // a lane's place in the fragments of mma.sync
  const int t = lane_id % 4;
  const int warp_row = warp_id / WARPS_N * WARP_M;  // within the block's tile
  const int warp_col = warp_id % WARPS_N * WARP_N;

  const float* a = args.a + block_row * args.stride_am;  // [BLOCK_M, K]
  const float* b = args.b + block_col * args.stride_bn;  // [K, BLOCK_N]
  float sums[TILES_M][TILES_N][4] = {};
  float chunk_sums[TILES_M][TILES_N][4] = {};
  for (int64_t k_begin = 0; k_begin < args.K; k_begin += BLOCK_K) {
    load_tile<BLOCK_K>(a_tile, a + k_begin * args.stride_ak, args.stride_am, args.stride_ak,
                       args.M - block_row, args.K - k_begin);
    load_tile<BLOCK_N>(b_tile, b + k_begin * args.stride_bk, args.stride_bk, args.stride_bn, args.K - k_begin,
                       args.N - block_col);
    __syncthreads();  // for both tiles to be complete

#pragma unroll
    for (int k = 0; k < BLOCK_K; k += 8) {
      uint32_t b_big[TILES_N][2], b_small[TILES_N][2];
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) {
        const int col = warp_col + 8 * n + g;
        split(b_tile[k + t][col], b_big[n][0], b_small[n][0]);
        split(b_tile[k + t + 4][col], b_big[n][1], b_small[n][1]);
      }
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        const int row = warp_row + 16 * m + g;
        uint32_t a_big[4], a_small[4];
        split(a_tile[row][k + t], a_big[0], a_small[0]);
        split(a_tile[row + 8][k + t], a_big[1], a_small[1]);
        split(a_tile[row][k + t + 4], a_big[2], a_small[2]);
        split(a_tile[row + 8][k + t + 4], a_big[3], a_small[3]);
        // The three products one after the other for all n: an mma need not wait for the one before it.
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) mma_m16n8k8_tf32(chunk_sums[m][n], a_small, b_big[n]);
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) mma_m16n8k8_tf32(chunk_sums[m][n], a_big, b_small[n]);
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) mma_m16n8k8_tf32(chunk_sums[m][n], a_big, b_big[n]);
        if ((k + 8) % CHUNK_K != 0) continue;
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[m][n][i] += chunk_sums[m][n][i];
            chunk_sums[m][n][i] = 0.0f;
          }
        }
      }
    }
    __syncthreads();  // for all reads, before the next tiles take the place of these
  }

  bool finite = true;
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = block_row + warp_row + 16 * m + g + i / 2 * 8;
        const int64_t col = block_col + warp_col + 8 * n + 2 * t + i % 2;
        if (row < args.M && col < args.N) args.out[row * args.N + col] = sums[m][n][i];
        finite &= isfinite(sums[m][n][i]);
      }
    }
  }

  // An infinite operand splits into inf and NaN, and the largest finite ones round up to inf: sums with them
  // come out as NaN. What is not finite is therefore summed again without splitting, which is right by
  // definition, and rare.
  if (__syncthreads_or(!finite)) {  // waits for the stores above too
    for (int i = threadIdx.x; i < BLOCK_M * BLOCK_N; i += THREADS) {
      const int64_t row = block_row + i / BLOCK_N;
      const int64_t col = block_col + i % BLOCK_N;
      if (row >= args.M || col >= args.N) continue;
      float* out = args.out + row * args.N + col;
      if (!isfinite(*out)) *out = plain_sum(args, row, col);
    }
  }
}

void matmul_tf32x3_v02_lean_split(const MatmulTf32x3Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  matmul_tf32x3_v02_lean_split_kernel<<<grid, THREADS, 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
}
