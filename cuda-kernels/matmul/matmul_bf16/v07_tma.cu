// matmul_bf16 v07_tma: TMA brings whole tiles, and wgmma multiplies them where they lie.
//
// Change:   one thread starts the copies of tiles by the tensor memory accelerator (TMA, the copy engine),
//           and an mbarrier says when both have arrived. A warpgroup, four warps together, multiplies them
//           from shared memory. v05's threads copied 16 bytes each and loaded fragments for mma.sync. The
//           tile starts over at 64 x 64, with nothing fetched ahead.
// Why:      the copy engine takes care of addresses, edges and swizzle, no fragments have to be loaded, and
//           no other instruction than wgmma reaches the tensor cores' full rate. While a block waits for its
//           tiles, others on its SM multiply. But small tiles are fetched more often: L2 becomes the limit.
// Counter:  instructions fall; time rises until tiles grow again.
// Requires: compute capability 9.0 with its own features (sm_90a); a and b with neighbours along rows or
//           columns, which are a multiple of 8 elements apart and start at multiples of 16 bytes; sizes below
//           2^31. Others are refused. out as ever: row-major, of any size, at any address.
// Source:   PTX ISA, "wgmma.mma_async" and "cp.async.bulk.tensor".
// Twin:     triton-kernels/matmul/matmul_bf16/v07_tma.py
#include "lib/ptx/hopper.cuh"
#include "lib/ptx/wgmma.cuh"
#include "operand.h"

constexpr int BLOCK_M = 64;
constexpr int BLOCK_N = 64;
constexpr int BLOCK_K = 64;
constexpr int GROUP_M = 16;
constexpr int BLOCKS_PER_SM = 8;

constexpr int WARPGROUP = 128;  // threads
constexpr int THREADS = WARPGROUP;
constexpr int SUMS = BLOCK_N / 2;  // of a thread
constexpr int ROW_BYTES = 128;     // 64 elements, as wide as the swizzle
constexpr int TILE_BYTES = 64 * ROW_BYTES;

static_assert(BLOCK_K * 2 == ROW_BYTES, "a tile's rows along K are as wide as the swizzle");
static_assert(BLOCK_M == 64 && SUMS == 32, "one wgmma covers the tile");

struct Problem {
  CUtensorMap a, b;
  void* out;  // [M, N], row-major
  int64_t M, N;
  int blocks_m, blocks_n;  // tiles
  int k_blocks;
};

struct Shared {
  uint8_t a[TILE_BYTES];  // [BLOCK_M, BLOCK_K], or [BLOCK_K, BLOCK_M] if A_COL
  uint8_t b[TILE_BYTES];  // [BLOCK_K, BLOCK_N], or [BLOCK_N, BLOCK_K] if B_COL
  uint64_t full;          // complete when both have come
};

// A tile's first row and column.
struct Place {
  int row, col;
};

// The grid is flat, since its y and z would end at 65535. Within a group the
// tile's row varies fastest; the last group may have fewer rows.
__device__ inline Place place_of(const Problem& problem, int tile) {
  const int group = tile / (GROUP_M * problem.blocks_n);
  const int within = tile % (GROUP_M * problem.blocks_n);
  const int group_rows = min(problem.blocks_m - group * GROUP_M, GROUP_M);
  return {(group * GROUP_M + within % group_rows) * BLOCK_M, within / group_rows * BLOCK_N};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One thread asks for both tiles.
template <bool A_COL, bool B_COL>
__device__ inline void fetch(const Problem& problem, Shared& shared, Place place, int k) {
  uint8_t* a = shared.a;
  uint8_t* b = shared.b;
  uint64_t* full = &shared.full;
  mbarrier_arrive_expect_tx(full, 2 * TILE_BYTES);
  if constexpr (A_COL) {
    tma_load(a, &problem.a, place.row, k, full);
  } else {
    tma_load(a, &problem.a, k, place.row, full);
  }
  if constexpr (B_COL) {
    tma_load(b, &problem.b, k, place.col, full);
  } else {
    tma_load(b, &problem.b, place.col, k, full);
  }
}

// The warpgroup stores its tile. Of every 8 columns, a lane holds two neighbours in one row, and
// two in the eighth row below.
template <typename T>
__device__ inline void store_sums(const Problem& problem, const float (&sums)[SUMS], int first_row,
                                  int first_col) {
  const int lane_id = threadIdx.x % 32;
  const int row = first_row + threadIdx.x % WARPGROUP / 32 * 16 + lane_id / 4;
  const int col = first_col + lane_id % 4 * 2;
  const int64_t cols = problem.N - col;
  const bool pairs = problem.N % 2 == 0 && reinterpret_cast<uintptr_t>(problem.out) % 4 == 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + half * 8 >= problem.M) break;
    T* out = static_cast<T*>(problem.out) + (row + half * 8) * problem.N + col;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; ++j) {
      const float* sum = &sums[j * 4 + half * 2];
      alignas(4) const T pair[2] = {from_float<T>(sum[0]), from_float<T>(sum[1])};
      if (pairs) {
        if (j * 8 < cols)
          *reinterpret_cast<uint32_t*>(out + j * 8) = *reinterpret_cast<const uint32_t*>(pair);
      } else {
        if (j * 8 < cols) out[j * 8] = pair[0];
        if (j * 8 + 1 < cols) out[j * 8 + 1] = pair[1];
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, bool A_COL, bool B_COL>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    matmul_bf16_v07_tma_kernel(const __grid_constant__ Problem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const Place place = place_of(problem, blockIdx.x);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&problem.a);
    prefetch_tensor_map(&problem.b);
    mbarrier_init(&shared.full, 1);
    fence_mbarrier_init();
  }
  __syncthreads();  // for the barrier

  const uint64_t a_tile = wgmma_tile(shared.a);
  const uint64_t b_tile = wgmma_tile(shared.b);
  constexpr int A_STEP = A_COL ? ROW_BYTES : 2;  // 16 of K, in descriptors' units of 16 bytes
  constexpr int B_STEP = B_COL ? 2 : ROW_BYTES;

  float sums[SUMS];
  for (int k = 0; k < problem.k_blocks; ++k) {
    if (threadIdx.x == 0) fetch<A_COL, B_COL>(problem, shared, place, k * BLOCK_K);
    mbarrier_wait_parity(&shared.full, k % 2);  // for both tiles
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_K / 16; ++step)
      wgmma_m64k16<BLOCK_N, T, A_COL, B_COL>(sums, a_tile + step * A_STEP, b_tile + step * B_STEP,
                                             k > 0 || step > 0);
    wgmma_commit_group();
    wgmma_wait_group<0>();  // for the products
    wgmma_hold(sums);
    __syncthreads();  // for all warps' products: the next tiles overwrite these
  }
  store_sums<T>(problem, sums, place.row, place.col);
#endif
}

void matmul_bf16_v07_tma(const MatmulBf16Args& args) {
  if (no_products(args)) return;
  const Operand a = require_a(args);
  const Operand b = require_b(args);
  Problem problem = {};
  problem.a = operand_map(a, args.dtype, BLOCK_M);
  problem.b = operand_map(b, args.dtype, BLOCK_N);
  problem.out = args.out;
  problem.M = args.M;
  problem.N = args.N;
  problem.blocks_m = cdiv(args.M, BLOCK_M);
  problem.blocks_n = cdiv(args.N, BLOCK_N);
  problem.k_blocks = cdiv(args.K, BLOCK_K);

  dispatch_operands(args.dtype, a, b, [&]<typename T, bool A_COL, bool B_COL>() {
    const auto kernel = matmul_bf16_v07_tma_kernel<T, A_COL, B_COL>;
    allow_shared_memory(kernel, sizeof(Shared));
    const int grid = problem.blocks_m * problem.blocks_n;
    kernel<<<grid, THREADS, sizeof(Shared), args.stream>>>(problem);
    CUDA_CHECK(cudaGetLastError());
  });
}
