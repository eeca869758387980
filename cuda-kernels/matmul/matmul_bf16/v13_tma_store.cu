// matmul_bf16 v13_tma_store: the result leaves through shared memory and the copy engine.
//
// Change:   a consumer writes its sums, 64 columns at a time, into one of two pieces of shared memory, from
//           which the copy engine stores them. v12's threads stored them from their registers.
// Why:      a warp's store of pairs touched 8 rows, 16 bytes in each, and the warpgroup waited until all of
//           its stores were issued. Now stmatrix writes whole rows, swizzled, the copy engine takes them in
//           lines, and its last two pieces leave while the next tile is multiplied. As no more than two
//           pieces are staged, all four stages fit beside them.
// Counter:  sectors_per_store falls to 0, as no thread stores to global memory; time falls.
// Requires: as v12. Rows of out that the copy engine cannot take are stored from the pieces by the word.
// Source:   CUTLASS's epilogues for compute capability 9.0, which stage and store like this.
// Twin:     triton-kernels/matmul/matmul_bf16/v13_tma_store.py
#include "lib/ptx/hopper.cuh"
#include "lib/ptx/wgmma.cuh"
#include "operand.h"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 4;
constexpr int CLUSTER = 2;  // blocks, one below the other
constexpr int GROUP_M = 8;  // rows of clusters
constexpr int PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = 232;

constexpr int WARPGROUP = 128;           // threads
constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that multiply 64 rows each
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int SUMS = BLOCK_N / 2;            // of a thread
constexpr int ROW_BYTES = 128;               // 64 elements, as wide as the swizzle
constexpr int PIECE_BYTES = 64 * ROW_BYTES;  // 64 of K by 64, or 64 by 64 of out
constexpr int A_BYTES = BLOCK_M / 64 * PIECE_BYTES;
constexpr int B_BYTES = BLOCK_N / 64 * PIECE_BYTES;

static_assert(BLOCK_K * 2 == ROW_BYTES, "a tile's rows along K are as wide as the swizzle");
static_assert(BLOCK_N / 64 % CLUSTER == 0, "the cluster's blocks fetch as many pieces of b's tile each");
static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "no more than the block starts with, or a warpgroup waits for ever");
static_assert(SUMS < CONSUMER_REGISTERS, "a thread holds its sums in registers");

struct Problem {
  CUtensorMap a, b;
  CUtensorMap out;   // empty unless out_mapped
  void* out_matrix;  // [M, N], row-major
  int64_t M, N;
  int blocks_m, blocks_n;  // clusters' tiles
  int k_blocks;
  bool out_mapped;  // the copy engine can store out
};

struct Shared {
  uint8_t a[STAGES][A_BYTES];              // [BLOCK_M, BLOCK_K], or pieces [BLOCK_K, 64] if A_COL
  uint8_t b[STAGES][B_BYTES];              // pieces [BLOCK_K, 64], or [BLOCK_N, BLOCK_K] if B_COL
  uint8_t out[CONSUMERS][2][PIECE_BYTES];  // [64, 64]
  uint64_t full[STAGES];                   // complete when a stage's tiles have come
  uint64_t empty[STAGES];                  // complete when all consumers of the cluster have multiplied them
};

// A tile's first row and column.
struct Place {
  int row, col;
};

// Of the cluster's block `rank`. The grid is flat, since its y and z would end at 65535. Within a group the
// tile's row varies fastest; the last group may have fewer rows.
__device__ inline Place place_of(const Problem& problem, int tile, int rank) {
  const int group = tile / (GROUP_M * problem.blocks_n);
  const int within = tile % (GROUP_M * problem.blocks_n);
  const int group_rows = min(problem.blocks_m - group * GROUP_M, GROUP_M);
  const int cluster_row = group * GROUP_M + within % group_rows;
  return {(cluster_row * CLUSTER + rank) * BLOCK_M, within / group_rows * BLOCK_N};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One thread of every block asks for its tile of a, and for its share of b's, which goes to all.
template <bool A_COL, bool B_COL>
__device__ inline void fetch(const Problem& problem, Shared& shared, int stage, Place place, int k,
                             int rank) {
  constexpr uint16_t ALL = (1 << CLUSTER) - 1;
  constexpr int SHARE = BLOCK_N / CLUSTER;  // columns
  uint8_t* a = shared.a[stage];
  uint8_t* b = shared.b[stage];
  uint64_t* full = &shared.full[stage];
  const int first = rank * SHARE;
  mbarrier_arrive_expect_tx(full, A_BYTES + B_BYTES);
  if constexpr (A_COL) {
#pragma unroll
    for (int i = 0; i < BLOCK_M; i += 64) tma_load(a + i * ROW_BYTES, &problem.a, place.row + i, k, full);
  } else {
    tma_load(a, &problem.a, k, place.row, full);
  }
  if constexpr (B_COL) {
    tma_load_multicast(b + first * ROW_BYTES, &problem.b, k, place.col + first, full, ALL);
  } else {
#pragma unroll
    for (int i = 0; i < SHARE; i += 64)
      tma_load_multicast(b + (first + i) * ROW_BYTES, &problem.b, place.col + first + i, k, full, ALL);
  }
}

// A warpgroup stages its 64 rows of 64 columns, each warp 16 of them. stmatrix takes what the threads hold of
// 16 columns: rows 0 to 7 and 8 to 15 of the first 8, then of the others.
template <typename T>
__device__ inline void stage_piece(uint8_t* piece, const float* sums) {
  const int lane_id = threadIdx.x % 32;
  const int row = threadIdx.x % WARPGROUP / 32 * 16 + lane_id % 16;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    uint32_t fragment[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* sum = &sums[j * 4 + i * 2];
      alignas(4) const T pair[2] = {from_float<T>(sum[0]), from_float<T>(sum[1])};
      fragment[i] = *reinterpret_cast<const uint32_t*>(pair);
    }
    stmatrix_x4(piece + row * ROW_BYTES + ((j + lane_id / 16) ^ row % 8) * 16, fragment);
  }
}

// Stores a staged piece whose rows the copy engine cannot take, by the word. `out` is its first element.
template <typename T>
__device__ inline void store_piece(T* out, const uint8_t* piece, int64_t N, int rows, int cols) {
  const int lane_id = threadIdx.x % 32;
  const int first_row = threadIdx.x % WARPGROUP / 32 * 16;
  for (int row = first_row; row < min(rows, first_row + 16); ++row) {
    const auto element = [&](int col) {
      return reinterpret_cast<const T*>(piece + row * ROW_BYTES + (col / 8 ^ row % 8) * 16)[col % 8];
    };
    // Words begin at even addresses, wherever the row does; one element is left at either end.
    T* line = out + row * N;
    const int shift = reinterpret_cast<uintptr_t>(line) / 2 % 2;
    const int col = lane_id * 2 + shift;
    if (shift == 1 && lane_id == 0) line[0] = element(0);
    if (col + 1 < cols) {
      alignas(4) const T pair[2] = {element(col), element(col + 1)};
      *reinterpret_cast<uint32_t*>(line + col) = *reinterpret_cast<const uint32_t*>(pair);
    } else if (col < cols) {
      line[col] = element(col);
    }
  }
}

// A warpgroup stores its 64 rows of a tile, in pieces of 64 columns, two of which may be on their way.
template <typename T>
__device__ inline void store_sums(const Problem& problem, uint8_t (&pieces)[2][PIECE_BYTES],
                                  const float (&sums)[SUMS], int first_row, int first_col) {
  const int consumer = threadIdx.x / WARPGROUP - 1;
  const int thread = threadIdx.x % WARPGROUP;
  if (first_row >= problem.M) return;
#pragma unroll
  for (int i = 0; i < BLOCK_N / 64; ++i) {
    const int col = first_col + i * 64;
    if (col >= problem.N) break;
    uint8_t* piece = pieces[i % 2];
    // For the store from this piece, the last but one; where a tile begins, for both, since the tile before
    // may have ended with either piece.
    if (thread == 0) i == 0 ? bulk_wait_group_read<0>() : bulk_wait_group_read<1>();
    named_barrier_sync(1 + consumer, WARPGROUP);  // for that wait, and for all that read this piece
    stage_piece<T>(piece, &sums[i * 32]);
    fence_proxy_async();                          // shows the piece to the copy engine
    named_barrier_sync(1 + consumer, WARPGROUP);  // for all of the piece
    if (problem.out_mapped) {
      if (thread == 0) {
        tma_store(&problem.out, piece, col, first_row);
        bulk_commit_group();
      }
    } else {
      store_piece(static_cast<T*>(problem.out_matrix) + first_row * problem.N + col, piece, problem.N,
                  min(problem.M - first_row, int64_t{64}), min(problem.N - col, int64_t{64}));
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, bool A_COL, bool B_COL>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_bf16_v13_tma_store_kernel(const __grid_constant__ Problem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int thread = threadIdx.x % WARPGROUP;
  const int rank = cluster_block();
  const int tiles = problem.blocks_m * problem.blocks_n;
  const int first_tile = blockIdx.x / CLUSTER;
  const int tile_step = gridDim.x / CLUSTER;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&problem.a);
    prefetch_tensor_map(&problem.b);
    if (problem.out_mapped) prefetch_tensor_map(&problem.out);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], CONSUMERS * CLUSTER);
    }
    fence_mbarrier_init();
  }
  cluster_sync();  // for the barriers of all its blocks

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
        const Place place = place_of(problem, tile, rank);
        for (int k = 0; k < problem.k_blocks; ++k) {
          mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);  // for the stage's last use, in all blocks
          fetch<A_COL, B_COL>(problem, shared, stage, place, k * BLOCK_K, rank);
          advance();
        }
      }
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();
    const int consumer = warpgroup - 1;
    // Every block of the cluster waits for all of them before it sends its share of b's tile.
    const auto release = [&](int multiplied) {
      if (thread < CLUSTER) mbarrier_arrive_in(&shared.empty[multiplied], thread);
    };
    const uint64_t a_tile = wgmma_tile(shared.a[0] + consumer * PIECE_BYTES);
    const uint64_t b_tile = wgmma_tile(shared.b[0], PIECE_BYTES);
    constexpr int A_STEP = A_COL ? ROW_BYTES : 2;  // 16 of K, in descriptors' units of 16 bytes
    constexpr int B_STEP = B_COL ? 2 : ROW_BYTES;

    Place next = place_of(problem, first_tile, rank);
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
      next = place_of(problem, min(tile + tile_step, tiles - 1), rank);  // while the last products run
      wgmma_wait_group<0>();                                             // for the sums
      wgmma_hold(sums);
      release(stage == 0 ? STAGES - 1 : stage - 1);
      store_sums<T>(problem, shared.out[consumer], sums, place.row + consumer * 64, place.col);
    }
    if (thread == 0) bulk_wait_group_read<0>();  // shared memory must outlive the stores from it
  }
  __syncwarp();    // the producer's lanes have diverged
  cluster_sync();  // shared memory must outlive the other blocks' copies into it and arrivals at it
#endif
}

void matmul_bf16_v13_tma_store(const MatmulBf16Args& args) {
  if (no_products(args)) return;
  const Operand a = require_a(args);
  const Operand b = require_b(args);
  Problem problem = {};
  problem.a = operand_map(a, args.dtype, BLOCK_M);
  problem.b = operand_map(b, args.dtype, BLOCK_N / CLUSTER);
  problem.out_matrix = args.out;
  problem.M = args.M;
  problem.N = args.N;
  problem.blocks_m = cdiv(args.M, BLOCK_M * CLUSTER);
  problem.blocks_n = cdiv(args.N, BLOCK_N);
  problem.k_blocks = cdiv(args.K, BLOCK_K);
  problem.out_mapped = mappable(args.out, args.dtype, args.M, args.N, args.N);
  if (problem.out_mapped) problem.out = tensor_map(args.out, args.dtype, args.M, args.N, args.N, 64);

  dispatch_operands(args.dtype, a, b, [&]<typename T, bool A_COL, bool B_COL>() {
    const auto kernel = matmul_bf16_v13_tma_store_kernel<T, A_COL, B_COL>;
    allow_shared_memory(kernel, sizeof(Shared));
    const int clusters = std::min(problem.blocks_m * problem.blocks_n, multiprocessor_count() / CLUSTER);
    cudaLaunchAttribute attribute = {.id = cudaLaunchAttributeClusterDimension};
    attribute.val.clusterDim = {CLUSTER, 1, 1};
    const cudaLaunchConfig_t config = {.gridDim = clusters * CLUSTER,
                                       .blockDim = THREADS,
                                       .dynamicSmemBytes = sizeof(Shared),
                                       .stream = args.stream,
                                       .attrs = &attribute,
                                       .numAttrs = 1};
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, problem));
  });
}
