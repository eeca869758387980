// matmul_bf16 v11_persistent: a persistent kernel, whose blocks walk over the tiles.
//
// Change:   there are as many blocks as SMs, and each computes every tile whose number is its own plus a
//           multiple of theirs. v10 had a block for every tile.
// Why:      a block that ends leaves its SM idle until the next one has set up its barriers and its first
//           tiles have come. One that stays has its ring full again by the time the sums are stored, since
//           the producer knows the next tile as soon as it has fetched this one.
// Counter:  time falls a little, tensor_pipe rises as much.
// Requires: as v10.
// Twin:     triton-kernels/matmul/matmul_bf16/v11_persistent.py
#include "lib/ptx/hopper.cuh"
#include "lib/ptx/wgmma.cuh"
#include "operand.h"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 4;
constexpr int GROUP_M = 16;
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = 232;

constexpr int WARPGROUP = 128;           // threads
constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that multiply 64 rows each
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int SUMS = BLOCK_N / 2;            // of a thread
constexpr int ROW_BYTES = 128;               // 64 elements, as wide as the swizzle
constexpr int PIECE_BYTES = 64 * ROW_BYTES;  // 64 of K by 64 of M or N
constexpr int A_BYTES = BLOCK_M / 64 * PIECE_BYTES;
constexpr int B_BYTES = BLOCK_N / 64 * PIECE_BYTES;

static_assert(BLOCK_K * 2 == ROW_BYTES, "a tile's rows along K are as wide as the swizzle");
static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "no more than the block starts with, or a warpgroup waits for ever");
static_assert(SUMS < CONSUMER_REGISTERS, "a thread holds its sums in registers");

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
  uint64_t empty[STAGES];      // complete when all consumers have multiplied them
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

// A warpgroup stores its 64 rows of a tile. Of every 8 columns, a lane holds two neighbours in one row, and
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
    matmul_bf16_v11_persistent_kernel(const __grid_constant__ Problem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int thread = threadIdx.x % WARPGROUP;
  const int tiles = problem.blocks_m * problem.blocks_n;
  const int first_tile = blockIdx.x;
  const int tile_step = gridDim.x;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&problem.a);
    prefetch_tensor_map(&problem.b);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], CONSUMERS);
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
    give_back_registers<PRODUCER_REGISTERS>();
    if (thread == 0) {
      for (int tile = first_tile; tile < tiles; tile += tile_step) {
        const Place place = place_of(problem, tile);
        for (int k = 0; k < problem.k_blocks; ++k) {
          mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);  // for the stage's last use
          fetch<A_COL, B_COL>(problem, shared, stage, place, k * BLOCK_K);
          advance();
        }
      }
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1;
    const auto release = [&](int multiplied) {
      if (thread == 0) mbarrier_arrive(&shared.empty[multiplied]);
    };
    const uint64_t a_tile = wgmma_tile(shared.a[0] + consumer * PIECE_BYTES);
    const uint64_t b_tile = wgmma_tile(shared.b[0], PIECE_BYTES);
    constexpr int A_STEP = A_COL ? ROW_BYTES : 2;  // 16 of K, in descriptors' units of 16 bytes
    constexpr int B_STEP = B_COL ? 2 : ROW_BYTES;

    Place next = place_of(problem, first_tile);
    for (int tile = first_tile; tile < tiles; tile += tile_step) {
      const Place place = next;
      float sums[SUMS];
      for (int k = 0; k < problem.k_blocks; ++k) {
        mbarrier_wait_parity(&shared.full[stage], phase);  // for the stage's tiles
        const uint64_t a = a_tile + stage * (A_BYTES / 16);
        const uint64_t b = b_tile + stage * (B_BYTES / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
          wgmma_m64k16<BLOCK_N, T, A_COL, B_COL>(sums, a + step * A_STEP, b + step * B_STEP,
                                                 k > 0 || step > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>();  // for the products of the stage before
        if (k > 0) release(stage == 0 ? STAGES - 1 : stage - 1);
        advance();
      }
      next = place_of(problem, min(tile + tile_step, tiles - 1));  // while the last products run
      wgmma_wait_group<0>();                                       // for the sums
      wgmma_hold(sums);
      release(stage == 0 ? STAGES - 1 : stage - 1);
      store_sums<T>(problem, sums, place.row + consumer * 64, place.col);
    }
  }
#endif
}

void matmul_bf16_v11_persistent(const MatmulBf16Args& args) {
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
    const auto kernel = matmul_bf16_v11_persistent_kernel<T, A_COL, B_COL>;
    allow_shared_memory(kernel, sizeof(Shared));
    const int grid = std::min(problem.blocks_m * problem.blocks_n, multiprocessor_count());
    kernel<<<grid, THREADS, sizeof(Shared), args.stream>>>(problem);
    CUDA_CHECK(cudaGetLastError());
  });
}
