// matmul_bf16 v03_swizzled: fragments come by ldmatrix, from a layout without bank conflicts.
//
// Change:   16-byte pieces change places within their row, by an XOR with the row's number, and ldmatrix
//           loads four 8 x 8 matrices at a time. Those of b it transposes on the way.
// Why:      the 8 pieces that ldmatrix reads at a time lie below each other. In v02 such rows began in the
//           same bank and took turns; now they fill all 32 banks, and so do 8 pieces that are stored side by
//           side. One ldmatrix does the work of 4 loads, or of 8 where pairs were put together.
// Counter:  bank_conflicts falls to nearly 0; instructions and time fall.
// Requires: as v02.
// Source:   the layout is that of CUTLASS, include/cutlass/layout/tensor_op_multiplicand_sm75.h.
// Twin:     none, Triton's compiler chooses the layout of shared memory by itself.
#include "args.h"
#include "lib/ptx/ampere.cuh"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int WARP_M = 64;
constexpr int WARP_N = 64;
constexpr int BLOCKS_PER_SM = 1;

constexpr int WARPS_N = BLOCK_N / WARP_N;
constexpr int THREADS = BLOCK_M / WARP_M * WARPS_N * 32;
constexpr int TILES_M = WARP_M / 16;  // tiles of one mma.sync in a warp's tile
constexpr int TILES_N = WARP_N / 8;
constexpr int STEPS = BLOCK_K / 16;  // products of depth 16 in a tile
constexpr int PIECE = 8;             // elements in 16 bytes

static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0 && WARP_M % 16 == 0, "warps divide a tile");
static_assert(BLOCK_K == 32 || BLOCK_K == 64 || BLOCK_K == 128, "steps are XORed into offsets along K");
static_assert(WARP_N == 16 || WARP_N == 32 || WARP_N == 64, "as are pairs of tiles into those along N");
static_assert(BLOCK_N % 64 == 0, "a row fills all banks");
static_assert((BLOCK_M + BLOCK_N) * BLOCK_K * 2 <= 48 * 1024, "the tiles fit static shared memory");

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

// Copies this thread's part of a tile [ROWS, COLS]; what lies past the edges becomes zero. `matrix` points at
// the tile's first element.
template <bool WIDE, int ROWS, int COLS, typename T>
__device__ inline void copy_tile(T* tile, const T* matrix, int64_t stride_row, int64_t stride_col,
                                 int64_t rows_left, int64_t cols_left) {
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
    Pack<T> pieces[ROWS / PASS] = {};
#pragma unroll
    for (int pass = 0; pass < ROWS / PASS; ++pass) {
      if (pass * PASS < valid_rows)
        pieces[pass] = *reinterpret_cast<const Pack<T>*>(from + pass * PASS * stride_row);
    }
#pragma unroll
    for (int pass = 0; pass < ROWS / PASS; ++pass)
      *reinterpret_cast<Pack<T>*>(to + pass * PASS * COLS) = pieces[pass];
  } else {
    // By the element. Neighbouring threads go along the smaller stride.
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
    matmul_bf16_v03_swizzled_kernel(MatmulBf16Args args) {
  __shared__ alignas(128) Tiles<T> tiles;

  // The grid is flat, since its y and z would end at 65535.
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t block_row = blockIdx.x / blocks_n * BLOCK_M;
  const int64_t block_col = blockIdx.x % blocks_n * BLOCK_N;
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const int warp_row = warp_id / WARPS_N * WARP_M;  // within the block's tile
  const int warp_col = warp_id % WARPS_N * WARP_N;

  // The row whose address a lane gives to ldmatrix, at the first step and the warp's first tile. The others
  // differ by whole rows, which are added, or in bits of the piece's place, which are XORed.
  const int a_offset = swizzled<BLOCK_K>(warp_row + lane_id % 16, lane_id / 16);
  const int b_offset = B_COL ? swizzled<BLOCK_K>(warp_col + lane_id / 16 * 8 + lane_id % 8, lane_id / 8 % 2)
                             : swizzled<BLOCK_N>(lane_id % 16, warp_col / PIECE + lane_id / 16);
  uint32_t a_fragments[TILES_M][4];
  uint32_t b_fragments[TILES_N / 2][4];  // of two tiles each
  const auto load_fragments = [&](int step) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m)
      ldmatrix_x4(a_fragments[m], &tiles.a[(a_offset ^ step * 16) + m * 16 * BLOCK_K]);
#pragma unroll
    for (int n = 0; n < TILES_N / 2; ++n) {
      if constexpr (B_COL) {
        ldmatrix_x4(b_fragments[n], &tiles.b[(b_offset ^ step * 16) + n * 16 * BLOCK_K]);
      } else {
        ldmatrix_x4_trans(b_fragments[n], &tiles.b[(b_offset ^ n * 16) + step * 16 * BLOCK_N]);
      }
    }
  };

  const T* a = static_cast<const T*>(args.a) + block_row * args.stride_am;  // [BLOCK_M, K]
  const T* b = static_cast<const T*>(args.b) + block_col * args.stride_bn;  // [K, BLOCK_N]
  float sums[TILES_M][TILES_N][4] = {};
  for (int64_t k = 0; k < args.K; k += BLOCK_K) {
    copy_tile<WIDE, BLOCK_M, BLOCK_K>(tiles.a, a + k * args.stride_ak, args.stride_am, args.stride_ak,
                                      args.M - block_row, args.K - k);
    if constexpr (B_COL) {
      copy_tile<WIDE, BLOCK_N, BLOCK_K>(tiles.b, b + k * args.stride_bk, args.stride_bn, args.stride_bk,
                                        args.N - block_col, args.K - k);
    } else {
      copy_tile<WIDE, BLOCK_K, BLOCK_N>(tiles.b, b + k * args.stride_bk, args.stride_bk, args.stride_bn,
                                        args.K - k, args.N - block_col);
    }
    __syncthreads();  // for both tiles to be complete
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      load_fragments(step);
#pragma unroll
      for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
          const uint32_t* b_fragment = &b_fragments[n / 2][n % 2 * 2];
          mma_m16n8k16<T>(sums[m][n], a_fragments[m], {b_fragment[0], b_fragment[1]});
        }
      }
    }
    __syncthreads();  // for all reads, before the next tiles take the place of these
  }

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

void matmul_bf16_v03_swizzled(const MatmulBf16Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  // Whether rows of `size` elements, `pitch` apart, consist of aligned pieces.
  const auto wide = [](const void* matrix, int64_t size, int64_t stride, int64_t pitch) {
    return aligned_to_16_bytes(matrix) && size % PIECE == 0 && stride == 1 && pitch % PIECE == 0;
  };
  const bool a_wide = wide(args.a, args.K, args.stride_ak, args.stride_am);
  const bool b_wide = wide(args.b, args.N, args.stride_bn, args.stride_bk);
  const bool b_col_wide = wide(args.b, args.K, args.stride_bk, args.stride_bn);
  const auto launch = [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = a_wide && b_wide       ? matmul_bf16_v03_swizzled_kernel<T, true, false>
                        : a_wide && b_col_wide ? matmul_bf16_v03_swizzled_kernel<T, true, true>
                                               : matmul_bf16_v03_swizzled_kernel<T, false, false>;
    kernel<<<grid, THREADS, 0, args.stream>>>(args);
    CUDA_CHECK(cudaGetLastError());
  };
  if (args.dtype == Dtype::bf16) {
    launch(__nv_bfloat16{});
  } else {
    launch(__half{});
  }
}
