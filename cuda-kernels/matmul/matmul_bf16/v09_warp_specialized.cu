// matmul_bf16 v09_warp_specialized: a producer fetches ahead, a consumer only multiplies.
//
// Change:   one warpgroup of a block fetches, by one of its threads, into a ring of STAGES tiles of a and b;
//           the other one multiplies. In v08 one warpgroup did both in turn.
// Why:      v08 asked for a tile when the one before it was used up, and relied on other blocks for work in
//           the meantime. The producer runs ahead by as many tiles as the ring holds. A full and an empty
//           barrier for each stage are all that the two sides share, so neither waits for the other's
//           instructions. The consumer still waits for its products before it starts the next ones.
// Counter:  time falls and tensor_pipe rises.
// Requires: as v08.
// Source:   CUTLASS's warp-specialised kernels for compute capability 9.0.
// Twin:     none; Triton pipelines loads by itself, see v16_gluon for roles by hand.
#include "lib/ptx/hopper.cuh"
#include "lib/ptx/wgmma.cuh"
#include "operand.h"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 6;
constexpr int GROUP_M = 16;

constexpr int WARPGROUP = 128;  // threads
constexpr int THREADS = 2 * WARPGROUP;
constexpr int SUMS = BLOCK_N / 2;            // of a thread, for 64 rows
constexpr int ROW_BYTES = 128;               // 64 elements, as wide as the swizzle
constexpr int PIECE_BYTES = 64 * ROW_BYTES;  // 64 of K by 64 of M or N
constexpr int A_BYTES = BLOCK_M / 64 * PIECE_BYTES;
constexpr int B_BYTES = BLOCK_N / 64 * PIECE_BYTES;

static_assert(BLOCK_K * 2 == ROW_BYTES, "a tile's rows along K are as wide as the swizzle");
static_assert(BLOCK_M / 64 * SUMS <= 128, "a thread holds its sums in registers");

struct Problem {
  CUtensorMap a, b;
  void* out;  // [M, N], row-major
  int64_t M, N;
  int blocks_m, blocks_n;  // tiles
  int k_blocks;
};

struct Shared {
  uint8_t a[STAGES][A_BYTES];  // [BLOCK_M, BLOCK_K], or pieces [BLOCK_K, 64] if A_COL
  uint8_t b[STAGES][B_BYTES];  // pieces [BLOCK_K, 64], or [BLOCK_N, BLOCK_K] if B_COL
  uint64_t full[STAGES];       // complete when a stage's tiles have come
  uint64_t empty[STAGES];      // complete when the consumer has multiplied them
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
__device__ inline void fetch(const Problem& problem, Shared& shared, int stage, Place place, int k) {
  uint8_t* a = shared.a[stage];
  uint8_t* b = shared.b[stage];
  uint64_t* full = &shared.full[stage];
  mbarrier_arrive_expect_tx(full, A_BYTES + B_BYTES);
  if constexpr (A_COL) {
#pragma unroll
    for (int i = 0; i < BLOCK_M; i += 64) tma_load(a + i * ROW_BYTES, &problem.a, place.row + i, k, full);
  } else {
    tma_load(a, &problem.a, k, place.row, full);
  }
  if constexpr (B_COL) {
    tma_load(b, &problem.b, k, place.col, full);
  } else {
#pragma unroll
    for (int i = 0; i < BLOCK_N; i += 64) tma_load(b + i * ROW_BYTES, &problem.b, place.col + i, k, full);
  }
}

// The warpgroup stores 64 rows of its tile. Of every 8 columns, a lane holds two neighbours in one row, and
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
__global__ void __launch_bounds__(THREADS, 1)
    matmul_bf16_v09_warp_specialized_kernel(const __grid_constant__ Problem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int thread = threadIdx.x % WARPGROUP;
  const Place place = place_of(problem, blockIdx.x);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&problem.a);
    prefetch_tensor_map(&problem.b);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // for the barriers

  int stage = 0;
  uint32_t phase = 0;
  const auto advance = [&] {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  };
  if (warpgroup == 0) {
    if (thread == 0) {
      for (int k = 0; k < problem.k_blocks; ++k) {
        mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);  // for the stage's last use
        fetch<A_COL, B_COL>(problem, shared, stage, place, k * BLOCK_K);
        advance();
      }
    }
  } else {
    const uint64_t a_tile = wgmma_tile(shared.a[0]);
    const uint64_t b_tile = wgmma_tile(shared.b[0], PIECE_BYTES);
    constexpr int A_STEP = A_COL ? ROW_BYTES : 2;  // 16 of K, in descriptors' units of 16 bytes
    constexpr int B_STEP = B_COL ? 2 : ROW_BYTES;

    float sums[BLOCK_M / 64][SUMS];
    for (int k = 0; k < problem.k_blocks; ++k) {
      mbarrier_wait_parity(&shared.full[stage], phase);  // for the stage's tiles
      const uint64_t a = a_tile + stage * (A_BYTES / 16);
      const uint64_t b = b_tile + stage * (B_BYTES / 16);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < BLOCK_K / 16; ++step) {
#pragma unroll
        for (int m = 0; m < BLOCK_M / 64; ++m)
          wgmma_m64k16<BLOCK_N, T, A_COL, B_COL>(sums[m], a + m * (PIECE_BYTES / 16) + step * A_STEP,
                                                 b + step * B_STEP, k > 0 || step > 0);
      }
      wgmma_commit_group();
      wgmma_wait_group<0>();  // for the products
      wgmma_hold(sums[0]);
      wgmma_hold(sums[1]);
      if (thread == 0) mbarrier_arrive(&shared.empty[stage]);
      advance();
    }
#pragma unroll
    for (int m = 0; m < BLOCK_M / 64; ++m) store_sums<T>(problem, sums[m], place.row + m * 64, place.col);
  }
#endif
}

void matmul_bf16_v09_warp_specialized(const MatmulBf16Args& args) {
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
    const auto kernel = matmul_bf16_v09_warp_specialized_kernel<T, A_COL, B_COL>;
    allow_shared_memory(kernel, sizeof(Shared));
    const int grid = problem.blocks_m * problem.blocks_n;
    kernel<<<grid, THREADS, sizeof(Shared), args.stream>>>(problem);
    CUDA_CHECK(cudaGetLastError());
  });
}
