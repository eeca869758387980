// matmul_bf16 v05_grouped: tiles are numbered so that blocks that run together touch a near-square patch.
//
// Change:   GROUP_M rows of tiles are walked column by column, where v04 walks one row after the other.
// Why:      an H100 runs 132 blocks at a time. For 8192 x 8192 elements those of v04 make up 4 rows of 32
//           tiles: they need all of b and a sixteenth of a, 136 MiB. 16 rows of 8 tiles need a quarter of
//           either, 64 MiB, of which L2 holds most. For 4096 x 4096 it is 40 MiB against 32, and both fit.
// Counter:  dram_bytes falls; time stays, and rises a little at 8192 x 8192.
// Requires: as v04.
// Source:   Triton's tutorial "Matrix Multiplication", section "L2 Cache Optimizations".
// Twin:     triton-kernels/matmul/matmul_bf16/v05_grouped.py
#include "args.h"
#include "lib/ptx/ampere.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int WARP_M = 64;
constexpr int WARP_N = 64;
constexpr int STAGES = 3;
constexpr int GROUP_M = 16;
constexpr int BLOCKS_PER_SM = 1;

constexpr int WARPS_N = BLOCK_N / WARP_N;
constexpr int THREADS = BLOCK_M / WARP_M * WARPS_N * 32;
constexpr int TILES_M = WARP_M / 16;  // tiles of one mma.sync in a warp's tile
constexpr int TILES_N = WARP_N / 8;
constexpr int STEPS = BLOCK_K / 16;  // products of depth 16 in a tile
constexpr int SHARES = STEPS - 1;    // a tile is fetched in shares, one beside every step but the last
constexpr int PIECE = 8;             // elements in 16 bytes

static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0 && WARP_M % 16 == 0, "warps divide a tile");
static_assert(BLOCK_K == 32 || BLOCK_K == 64 || BLOCK_K == 128, "steps are XORed into offsets along K");
static_assert(WARP_N == 16 || WARP_N == 32 || WARP_N == 64, "as are pairs of tiles into those along N");
static_assert(BLOCK_N % 64 == 0, "a row fills all banks");
static_assert(STAGES >= 2, "one stage is read while another is filled");

template <typename T>
struct Tiles {
  T a[BLOCK_M * BLOCK_K];  // [BLOCK_M, BLOCK_K]
  T b[BLOCK_K * BLOCK_N];  // [BLOCK_K, BLOCK_N], or [BLOCK_N, BLOCK_K] if B_COL
};

// Where a piece of 16 bytes lies in a tile with rows of COLS elements. The lower bits of its place in the row
// are XORed with the row, so that 8 neighbours in a column fill all 32 banks just as 8 in a row do.
template <int COLS>
__device__ inline int swizzled(int row, int piece) {
  constexpr int PIECES = COLS < 64 ? COLS / PIECE : 8;  // of one row in the 128 bytes of all banks
  constexpr int ROWS = 8 / PIECES;                      // in those 128 bytes
  return row * COLS + (piece ^ row / ROWS % PIECES) * PIECE;
}

// Copies this thread's part of a share of a tile [ROWS, COLS]; what lies past the edges becomes zero.
// `matrix` points at the tile's first element; cp.async is given `valid_address` where nothing is read.
template <bool WIDE, int ROWS, int COLS, typename T>
__device__ inline void copy_tile(T* tile, const T* matrix, int64_t stride_row, int64_t stride_col,
                                 int64_t rows_left, int64_t cols_left, const T* valid_address, int share) {
  const int rows = min(rows_left, int64_t{ROWS});
  const int cols = min(cols_left, int64_t{COLS});
  if constexpr (WIDE) {
    constexpr int PASS = THREADS / (COLS / PIECE);  // rows that all threads together fetch a piece each of
    static_assert(PASS % 8 == 0 && ROWS % PASS == 0,
                  "every pass is swizzled alike, and all threads take part");
    const int row = threadIdx.x / (COLS / PIECE);
    const int piece = threadIdx.x % (COLS / PIECE);
    const T* from = matrix + row * stride_row + piece * PIECE;
    T* to = tile + swizzled<COLS>(row, piece);
    const int valid_rows = piece * PIECE < cols ? rows - row : 0;
#pragma unroll
    for (int pass = share; pass < ROWS / PASS; pass += SHARES) {
      const bool valid = pass * PASS < valid_rows;
      cp_async<16>(to + pass * PASS * COLS, valid ? from + pass * PASS * stride_row : valid_address, valid);
    }
  } else if (share == 0) {
    // By the element, all in the first share. Neighbouring threads go along the smaller stride.
    static_assert(THREADS % ROWS == 0 && THREADS % COLS == 0, "all threads take whole rows or columns");
    const bool along_row = stride_col <= stride_row;
    const int row_step = along_row ? THREADS / COLS : 0;
    const int col_step = along_row ? 0 : THREADS / ROWS;
    int row = along_row ? threadIdx.x / COLS : threadIdx.x % ROWS;
    int col = along_row ? threadIdx.x % COLS : threadIdx.x / ROWS;
    const T* from = matrix + row * stride_row + col * stride_col;
#pragma unroll 8
    for (int i = 0; i < ROWS * COLS / THREADS; ++i) {
      tile[swizzled<COLS>(row, col / PIECE) + col % PIECE] =
          row < rows && col < cols ? *from : from_float<T>(0.0f);
      row += row_step;
      col += col_step;
      from += row_step * stride_row + col_step * stride_col;
    }
  }
}

// WIDE: a and b can be copied in pieces of 16 bytes. B_COL: if so, along the columns of b.
template <typename T, bool WIDE, bool B_COL>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_bf16_v05_grouped_kernel(MatmulBf16Args args) {
  alignas(128) extern __shared__ uint4 shared[];
  Tiles<T>* stages = reinterpret_cast<Tiles<T>*>(shared);  // [STAGES]

  // The grid is flat, since its y and z would end at 65535.
  const int64_t blocks_m = cdiv(args.M, BLOCK_M);
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t group = blockIdx.x / (GROUP_M * blocks_n);
  const int64_t within = blockIdx.x % (GROUP_M * blocks_n);
  const int64_t group_rows = min(blocks_m - group * GROUP_M, int64_t{GROUP_M});
  const int64_t block_row = (group * GROUP_M + within % group_rows) * BLOCK_M;
  const int64_t block_col = within / group_rows * BLOCK_N;
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const int warp_row = warp_id / WARPS_N * WARP_M;  // within the block's tile
  const int warp_col = warp_id % WARPS_N * WARP_N;

  // What is still to be fetched: [BLOCK_M, k_left] and [k_left, BLOCK_N].
  const T* a = static_cast<const T*>(args.a) + block_row * args.stride_am;
  const T* b = static_cast<const T*>(args.b) + block_col * args.stride_bn;
  int64_t k_left = args.K;
  const auto copy = [&](Tiles<T>& tiles, int share) {
    copy_tile<WIDE, BLOCK_M, BLOCK_K>(tiles.a, a, args.stride_am, args.stride_ak, args.M - block_row, k_left,
                                      static_cast<const T*>(args.a), share);
    if constexpr (B_COL) {
      copy_tile<WIDE, BLOCK_N, BLOCK_K>(tiles.b, b, args.stride_bn, args.stride_bk, args.N - block_col,
                                        k_left, static_cast<const T*>(args.b), share);
    } else {
      copy_tile<WIDE, BLOCK_K, BLOCK_N>(tiles.b, b, args.stride_bk, args.stride_bn, k_left,
                                        args.N - block_col, static_cast<const T*>(args.b), share);
    }
    if (share == SHARES - 1) {
      cp_async_commit_group();
      a += BLOCK_K * args.stride_ak;
      b += BLOCK_K * args.stride_bk;
      k_left -= BLOCK_K;
    }
  };

  // The row whose address a lane gives to ldmatrix, at the first step and the warp's first tile. The others
  // differ by whole rows, which are added, or in bits of the piece's place, which are XORed.
  const int a_offset = swizzled<BLOCK_K>(warp_row + lane_id % 16, lane_id / 16);
  const int b_offset = B_COL ? swizzled<BLOCK_K>(warp_col + lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2)
                             : swizzled<BLOCK_N>(lane_id % 16, warp_col / PIECE + lane_id / 16);
  uint32_t a_fragments[2][TILES_M][4];
  uint32_t b_fragments[2][TILES_N / 2][4];  // of two tiles each
  const auto load_fragments = [&](const Tiles<T>& tiles, int step) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
      ldmatrix_x4(a_fragments[step % 2][m], &tiles.a[(a_offset ^ step * 16) + m * 16 * BLOCK_K]);
#pragma unroll
    for (int n = 0; n < TILES_N / 2; ++n) {
      if constexpr (B_COL) {
        ldmatrix_x4(b_fragments[step % 2][n], &tiles.b[(b_offset ^ step * 16) + n * 16 * BLOCK_K]);
      } else {
        ldmatrix_x4_trans(b_fragments[step % 2][n], &tiles.b[(b_offset ^ n * 16) + step * 16 * BLOCK_N]);
      }
    }
  };

  for (int stage = 0; stage < STAGES - 1; ++stage) {
#pragma unroll
    for (int share = 0; share < SHARES; ++share) copy(stages[stage], share);
  }
  cp_async_wait_group<STAGES - 2>();  // for this thread's part of the first tile
  __syncthreads();                    // for the others' parts
  load_fragments(stages[0], 0);

  float sums[TILES_M][TILES_N][4] = {};
  int stage = 0;
  for (int64_t k = 0; k < args.K; k += BLOCK_K) {
    Tiles<T>& filled = stages[stage == 0 ? STAGES - 1 : stage - 1];  // the tile before, read by all
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      // While this step's products run, the next step's fragments are loaded and a share of a tile fetched.
      if (step < STEPS - 1) {
        load_fragments(stages[stage], step + 1);
        copy(filled, step);
      } else {
        cp_async_wait_group<STAGES - 2>();  // for this thread's part of the next tile
        __syncthreads();                    // for the others' parts, and for all reads of this tile
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        load_fragments(stages[stage], 0);
      }
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
          const uint32_t* b_fragment = &b_fragments[step % 2][n / 2][n % 2 * 2];
          mma_m16n8k16<T>(sums[m][n], a_fragments[step % 2][m], {b_fragment[0], b_fragment[1]});
        }
      }
    }
  }

  cp_async_wait_group<0>();  // shared memory must outlive the copies into it, though these are but zeros

  // Of every 16 x 8 sums a lane holds two neighbours in row lane_id / 4 and two in the eighth row below.
  const int row = warp_row + lane_id / 4;
  const int col = warp_col + lane_id % 4 * 2;
  const int rows = min(args.M - block_row, int64_t{BLOCK_M}) - row;
  const int cols = min(args.N - block_col, int64_t{BLOCK_N}) - col;
  T* out = static_cast<T*>(args.out) + (block_row + row) * args.N + block_col + col;
  const bool pairs = args.N % 2 == 0 && reinterpret_cast<uintptr_t>(args.out) % 4 == 0;
#pragma unroll
  for (int m = 0; m < TILES_M * 2; ++m, out += 8 * args.N) {
    if (m * 8 >= rows) break;
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
      const float* sum = &sums[m / 2][n][m % 2 * 2];
      alignas(4) const T pair[2] = {from_float<T>(sum[0]), from_float<T>(sum[1])};
      if (pairs) {
        if (n * 8 < cols)
          *reinterpret_cast<uint32_t*>(out + n * 8) = *reinterpret_cast<const uint32_t*>(pair);
      } else {
        if (n * 8 < cols) out[n * 8] = pair[0];
        if (n * 8 + 1 < cols) out[n * 8 + 1] = pair[1];
      }
    }
  }
}

void matmul_bf16_v05_grouped(const MatmulBf16Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  // Whether rows of `size` elements, `pitch` apart, consist of aligned pieces, and there are any.
  const auto wide = [](const void* matrix, int64_t size, int64_t stride, int64_t pitch) {
    return aligned_to_16_bytes(matrix) && size > 0 && size % PIECE == 0 && stride == 1 && pitch % PIECE == 0;
  };
  const bool a_wide = wide(args.a, args.K, args.stride_ak, args.stride_am);
  const bool b_wide = wide(args.b, args.N, args.stride_bn, args.stride_bk);
  const bool b_col_wide = wide(args.b, args.K, args.stride_bk, args.stride_bn);
  const auto launch = [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = a_wide && b_wide       ? matmul_bf16_v05_grouped_kernel<T, true, false>
                        : a_wide && b_col_wide ? matmul_bf16_v05_grouped_kernel<T, true, true>
                                               : matmul_bf16_v05_grouped_kernel<T, false, false>;
    constexpr int SHARED = STAGES * sizeof(Tiles<T>);
    allow_shared_memory(kernel, SHARED);
    kernel<<<grid, THREADS, SHARED, args.stream>>>(args);
    CUDA_CHECK(cudaGetLastError());
  };
  if (args.dtype == Dtype::bf16) {
    launch(__nv_bfloat16{});
  } else {
    launch(__half{});
  }
}
