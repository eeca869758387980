// matmul_tf32x3 v03_pipelined: the tensor cores need not wait for tiles or fragments.
//
// Change:   tiles are copied by cp.async, STAGES - 1 of them ahead; fragments are read 8 of K ahead, across
//           the barrier between tiles too, those of a by ldmatrix, those of b by 16-byte loads. Warps
//           compute 64 x 32 elements, and blocks are numbered in groups of GROUP_M rows of tiles.
// Why:      v02 copied, waited and multiplied in turn. Now one barrier a tile is left, with products at
//           hand on its far side, and two blocks an SM fill each other's gaps. A warp's larger tile needs
//           0.5 splits for an mma where v02 had 0.67, and both new reads take the place of four. Blocks of
//           a group share tiles, which stay in L2.
// Counter:  tensor_pipe rises; shared-memory load requests an mma fall.
// Requires: compute capability 8.0 and 104 KiB of shared memory a block, which 8.0, 9.0 and 10.0 have and
//           8.6, 8.9 and 12.0 have not (two blocks an SM only from 9.0 on). a and b of any strides, out
//           row-major. Copies take 16 bytes where the rows of all three are contiguous and multiples of 16
//           bytes long and aligned, else 4, with neighbouring threads along the smaller stride. Infinities
//           and NaNs come out as in fp32. An operand below 2^-114 keeps fewer bits, since its small part
//           ends at 2^-136, TF32's smallest number; TF32's own 11 bits are left at 2^-126.
// Twin:     triton-kernels/matmul/matmul_tf32x3/v03_pipelined.py
#include "args.h"
#include "lib/common.cuh"
#include "lib/ptx/ampere.cuh"

constexpr int BLOCK_M = 64;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 32;
constexpr int WARP_M = 64;
constexpr int WARP_N = 32;
constexpr int CHUNK_K = 32;
constexpr int STAGES = 4;
constexpr int GROUP_M = 8;
constexpr int BLOCKS_PER_SM = 2;

constexpr int WARPS_N = BLOCK_N / WARP_N;
constexpr int THREADS = BLOCK_M / WARP_M * WARPS_N * 32;
constexpr int TILES_M = WARP_M / 16;  // tiles of one mma in a warp's tile
constexpr int TILES_N = WARP_N / 8;

// Rows of the shared tiles, padded: the 8 rows of 16 bytes that ldmatrix reads at a time, and the 8 lanes
// (two g, four t) that a 16-byte load serves at a time from b[t][4 g], meet 32 different banks.
constexpr int PITCH_A = BLOCK_K + 4;
constexpr int PITCH_B = BLOCK_N + 8;

struct Stage {
  float a[BLOCK_M][PITCH_A];
  float b[BLOCK_K][PITCH_B];
};

static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "warps divide the block's tile");
static_assert(WARP_M % 16 == 0 && WARP_N % 32 == 0, "fragments divide a warp's tile, those of b by fours");
static_assert(BLOCK_K % CHUNK_K == 0 && CHUNK_K % 8 == 0, "chunks divide the block's tile");
static_assert(BLOCK_K / 8 % 2 == 0, "two buffers of fragments take turns");
static_assert(PITCH_A % 8 == 4 && PITCH_B % 16 == 8, "see above");
static_assert(STAGES >= 2, "a tile is copied while another is read");

// Starts copying a tile from the matrix that goes on for `rows` and `cols` from source, WIDTH floats at a
// time. Zeros past its edges, where nothing is read. Neighbouring threads take neighbouring columns, or rows
// if their stride is smaller.
template <int WIDTH, int COLS, int ROWS, int PITCH>
__device__ inline void copy_tile(float (&tile)[ROWS][PITCH], const float* source, int64_t stride_row,
                                 int64_t stride_col, int rows, int cols) {
  constexpr int COLS_AT_ONCE = THREADS / ROWS;
  constexpr int ROWS_AT_ONCE = THREADS / (COLS / WIDTH);
  static_assert(THREADS % ROWS == 0 && COLS % COLS_AT_ONCE == 0, "threads share the copying by columns");
  static_assert(THREADS % (COLS / WIDTH) == 0 && ROWS % ROWS_AT_ONCE == 0, "threads share it by rows");
  if (WIDTH == 1 && stride_row < stride_col) {
    const int row = threadIdx.x % ROWS;
    const int first_col = threadIdx.x / ROWS;
    source += row * stride_row + first_col * stride_col;
#pragma unroll
    for (int i = 0; i < COLS; i += COLS_AT_ONCE, source += COLS_AT_ONCE * stride_col) {
      cp_async<4>(&tile[row][first_col + i], source, row < rows && first_col + i < cols);
    }
  } else {
    const int first_row = threadIdx.x / (COLS / WIDTH);
    const int col = threadIdx.x % (COLS / WIDTH) * WIDTH;
    source += first_row * stride_row + col * stride_col;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE, source += ROWS_AT_ONCE * stride_row) {
      cp_async<4 * WIDTH>(&tile[first_row + i][col], source, first_row + i < rows && col < cols);
    }
  }
}

// x = big + small but for its last bit. The subtraction is exact, and leaves at most 13 bits.
__device__ inline void split(uint32_t x, uint32_t& big, uint32_t& small) {
  big = to_tf32(__uint_as_float(x));
  small = __float_as_uint(__uint_as_float(x) - __uint_as_float(big));
}

// One element by the formula, in fp32 alone.
__device__ inline float plain_sum(const MatmulTf32x3Args& args, int64_t row, int64_t col) {
  const float* a = args.a + row * args.stride_am;  // [K]
  const float* b = args.b + col * args.stride_bn;  // [K]
  float sum = 0.0f;
  for (int64_t k = 0; k < args.K; ++k) sum += a[k * args.stride_ak] * b[k * args.stride_bk];
  return sum;
}

// WIDTH: floats a copy and a store, 4 or 1.
template <int WIDTH>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_tf32x3_v03_pipelined_kernel(MatmulTf32x3Args args) {
  extern __shared__ float4 shared[];
  Stage* stages = reinterpret_cast<Stage*>(shared);  // [STAGES]

  // The grid is flat, since its y and z would end at 65535. Within a group the tile's row varies fastest; the
  // last group may have fewer rows.
  const int64_t blocks_m = cdiv(args.M, BLOCK_M);
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t group = blockIdx.x / (GROUP_M * blocks_n);
  const int64_t within = blockIdx.x % (GROUP_M * blocks_n);
  const int64_t group_rows = min(blocks_m - group * GROUP_M, int64_t{GROUP_M});
  const int64_t block_row = (group * GROUP_M + within % group_rows) * BLOCK_M;
  const int64_t block_col = within / group_rows * BLOCK_N;
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const int g = lane_id / 4;  // a lane's place in the fragments of mma.sync
  const int t = lane_id % 4;
  const int warp_row = warp_id / WARPS_N * WARP_M;  // within the block's tile
  const int warp_col = warp_id % WARPS_N * WARP_N;

  const float* a = args.a + block_row * args.stride_am;  // [BLOCK_M, K], from the next tile to copy on
  const float* b = args.b + block_col * args.stride_bn;  // [K, BLOCK_N]
  const int rows = min(args.M - block_row, int64_t{BLOCK_M});
  const int cols = min(args.N - block_col, int64_t{BLOCK_N});
  int64_t depth = args.K;  // from the next tile to copy on; past K there are zeros, which are not multiplied
  const auto copy_next = [&](Stage& stage) {
    const int tile_depth = min(depth, int64_t{BLOCK_K});
    copy_tile<WIDTH, BLOCK_K>(stage.a, a, args.stride_am, args.stride_ak, rows, tile_depth);
    copy_tile<WIDTH, BLOCK_N>(stage.b, b, args.stride_bk, args.stride_bn, tile_depth, cols);
    cp_async_commit_group();
    a += BLOCK_K * args.stride_ak;
    b += BLOCK_K * args.stride_bk;
    depth -= BLOCK_K;
  };

  // Two buffers of fragments: one is read while the other is multiplied. A lane reads four columns of b at
  // once, so column g of the n-th mma is not column 8 n + g of the tile but 8 (n - n % 4) + 4 g + n % 4.
  uint32_t a_bits[2][TILES_M][4], b_bits[2][TILES_N][2];
  const auto read_fragments = [&](const Stage& stage, int k) {
    const int buffer = k / 8 % 2;
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
      ldmatrix_x4(a_bits[buffer][m], &stage.a[warp_row + 16 * m + lane_id % 16][k + lane_id / 16 * 4]);
    }
#pragma unroll
    for (int n = 0; n < TILES_N; n += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* four = &stage.b[k + t + 4 * i][warp_col + 8 * n + 4 * g];
        const uint4 bits = *reinterpret_cast<const uint4*>(four);
        b_bits[buffer][n][i] = bits.x;
        b_bits[buffer][n + 1][i] = bits.y;
        b_bits[buffer][n + 2][i] = bits.z;
        b_bits[buffer][n + 3][i] = bits.w;
      }
    }
  };

  float sums[TILES_M][TILES_N][4] = {};
  float chunk_sums[TILES_M][TILES_N][4] = {};
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) copy_next(stages[i]);
  cp_async_wait_group<STAGES - 2>();  // for this thread's part of the first tile
  __syncthreads();                    // for the others' parts
  read_fragments(stages[0], 0);

  int current = 0;  // stage
  for (int64_t k_begin = 0; k_begin < args.K; k_begin += BLOCK_K) {
    const int next = (current + 1) % STAGES;
    copy_next(stages[(current + STAGES - 1) % STAGES]);  // where the tile before this one was
#pragma unroll
    for (int k = 0; k < BLOCK_K; k += 8) {
      if (k + 8 < BLOCK_K) {
        read_fragments(stages[current], k + 8);
      } else {
        cp_async_wait_group<STAGES - 2>();  // for this thread's part of the next tile
        __syncthreads();                    // for the others' parts, and for all reads of this tile
        read_fragments(stages[next], 0);
      }

      const int buffer = k / 8 % 2;
      uint32_t b_big[TILES_N][2], b_small[TILES_N][2];
#pragma unroll
      for (int n = 0; n < TILES_N; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) split(b_bits[buffer][n][i], b_big[n][i], b_small[n][i]);
      }
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
        uint32_t a_big[4], a_small[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) split(a_bits[buffer][m][i], a_big[i], a_small[i]);
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
    current = next;
  }
  cp_async_wait_group<0>();  // no copy, be it of zeros, may outlive the block

  bool finite = true;
#pragma unroll
  for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
    for (int n = 0; n < TILES_N; n += 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Column 2 t + i % 2 of four mma: four neighbours in the tile.
        const int64_t row = block_row + warp_row + 16 * m + g + i / 2 * 8;
        const int64_t col = block_col + warp_col + 8 * n + 4 * (2 * t + i % 2);
        float* out = args.out + row * args.N + col;
        if (WIDTH == 4 && row < args.M && col < args.N) {
          *reinterpret_cast<float4*>(out) =
              make_float4(sums[m][n][i], sums[m][n + 1][i], sums[m][n + 2][i], sums[m][n + 3][i]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (WIDTH == 1 && row < args.M && col + j < args.N) out[j] = sums[m][n + j][i];
          finite &= isfinite(sums[m][n + j][i]);
        }
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

void matmul_tf32x3_v03_pipelined(const MatmulTf32x3Args& args) {
  if (args.M == 0 || args.N == 0) return;
  // A row that is no multiple of 4 floats long would end inside a copy.
  const bool wide = args.stride_ak == 1 && args.stride_am % 4 == 0 && args.K % 4 == 0 &&
                    args.stride_bn == 1 && args.stride_bk % 4 == 0 && args.N % 4 == 0 &&
                    aligned_to_16_bytes(args.a, args.b, args.out);
  const auto kernel = wide ? matmul_tf32x3_v03_pipelined_kernel<4> : matmul_tf32x3_v03_pipelined_kernel<1>;
  constexpr int SHARED = STAGES * sizeof(Stage);
  allow_shared_memory(kernel, SHARED);
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  kernel<<<grid, THREADS, SHARED, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
}
