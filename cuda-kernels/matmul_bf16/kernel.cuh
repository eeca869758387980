// The kernel that matmul_bf16's last step launches, by tile shape and layout: v13_tma_store's, with K split
// between blocks where there are few tiles, fp32 or T as output, and A in either layout.
#pragma once

#include <algorithm>

#include "../hopper.cuh"
#include "../tensor_map.h"
#include "../wgmma.cuh"
#include "args.h"

constexpr int BLOCK_K = 64;        // 128 bytes, a row of the swizzle
constexpr int WARPGROUP = 128;     // threads
constexpr int GROUP_M = 8;         // rows of clusters' tiles that are walked column by column
constexpr int PIECE_BYTES = 8192;  // 64 rows of 128 bytes: what a box copies at least, or an epilogue stages
constexpr int SHARED_BYTES = 232448;  // as much as a block can have

// What a launch is told, by value.
struct MatmulProblem {
  CUtensorMap a, b, out;  // out's is empty unless out_mapped
  void* out_matrix;       // [M, N], row-major
  int64_t M, N;
  int k_blocks;
  int splits;          // blocks that share a tile's K
  bool out_mapped;     // the copy engine can store out
  bool out_fp32;       // else T
  float4* partials;    // [tiles, splits, a tile's sums], where splits > 1
  unsigned* counters;  // [tiles, consumers], zero before and after
};

// BLOCK_M x BLOCK_N sums a block; CLUSTER blocks, one below the other, share their tile of B.
template <typename T_, int BLOCK_M_, int BLOCK_N_, int CLUSTER_, bool A_COL_, bool B_COL_>
struct MatmulTile {
  using T = T_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int CLUSTER = CLUSTER_;
  static constexpr bool A_COL = A_COL_;  // a is column-major
  static constexpr bool B_COL = B_COL_;

  static constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that multiply 64 rows each
  static constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
  static constexpr int SUMS = BLOCK_N / 2;  // of a thread
  static constexpr int STAGE_BYTES = (BLOCK_M + BLOCK_N) * BLOCK_K * sizeof(T);
  static constexpr int STAGING_BYTES = CONSUMERS * 2 * PIECE_BYTES;
  static constexpr int STAGES = std::min(8, (SHARED_BYTES - STAGING_BYTES - 256) / STAGE_BYTES);

  struct Shared {
    T a[STAGES][BLOCK_M * BLOCK_K];  // [BLOCK_M, BLOCK_K], or pieces [BLOCK_K, 64] if A_COL
    T b[STAGES][BLOCK_K * BLOCK_N];  // pieces [BLOCK_K, 64], or [BLOCK_N, BLOCK_K] if B_COL
    uint8_t out[CONSUMERS][2][PIECE_BYTES];
    uint64_t full[STAGES];  // complete when a stage's tiles have come
    uint64_t
        empty[STAGES];  // complete when all consumers, of all blocks that it is shared with, have read it
    unsigned ticket[CONSUMERS];
  };
  static_assert(sizeof(Shared) <= SHARED_BYTES && STAGES >= 3);
};

// The tiles that a block computes, in grouped order.
template <typename Tile>
struct MatmulWalk {
  int blocks_m, blocks_n;  // of clusters
  int splits, k_blocks;
  int units;

  __device__ explicit MatmulWalk(const MatmulProblem& problem)
      : blocks_m(cdiv(problem.M, Tile::BLOCK_M * Tile::CLUSTER)),
        blocks_n(cdiv(problem.N, Tile::BLOCK_N)),
        splits(problem.splits),
        k_blocks(problem.k_blocks),
        units(blocks_m * blocks_n * splits) {}

  struct Unit {
    int tile;  // its number among all blocks' tiles
    int row, col, split;
    int k_begin, k_end;  // in blocks
  };

  __device__ Unit at(int unit) const {
    const int of_cluster = splits == 1 ? unit : unit / splits;
    const int split = unit - of_cluster * splits;
    const int group = of_cluster / (GROUP_M * blocks_n);
    const int within = of_cluster - group * GROUP_M * blocks_n;
    const int group_rows = min(blocks_m - group * GROUP_M, GROUP_M);
    const int group_col = within / group_rows;
    const int group_row = within - group_col * group_rows;
    const int rank = Tile::CLUSTER == 1 ? 0 : cluster_block();
    return {of_cluster * Tile::CLUSTER + rank,
            ((group * GROUP_M + group_row) * Tile::CLUSTER + rank) * Tile::BLOCK_M,
            group_col * Tile::BLOCK_N,
            split,
            splits == 1 ? 0 : k_blocks * split / splits,
            splits == 1 ? k_blocks : k_blocks * (split + 1) / splits};
  }
};

// One thread fetches the tiles of a unit.
template <typename Tile>
__device__ inline void fetch(const MatmulProblem& problem, typename Tile::Shared& shared, int stage, int row,
                             int col, int k) {
  constexpr int PIECE = PIECE_BYTES / sizeof(typename Tile::T);  // elements
  uint64_t* full = &shared.full[stage];
  mbarrier_arrive_expect_tx(full, Tile::STAGE_BYTES);
  if constexpr (Tile::A_COL) {
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_M / 64; ++i)
      tma_load(&shared.a[stage][i * PIECE], &problem.a, row + i * 64, k, full);
  } else {
    tma_load(shared.a[stage], &problem.a, k, row, full);
  }
  // Every block of a cluster fetches its share of B's tile, for all.
  const int rank = Tile::CLUSTER == 1 ? 0 : cluster_block();
  const auto load = [&](typename Tile::T* to, int x, int y) {
    if constexpr (Tile::CLUSTER == 1) {
      tma_load(to, &problem.b, x, y, full);
    } else {
      tma_load_multicast(to, &problem.b, x, y, full, (1 << Tile::CLUSTER) - 1);
    }
  };
  if constexpr (Tile::B_COL) {
    constexpr int COLS = Tile::BLOCK_N / Tile::CLUSTER;
    load(&shared.b[stage][rank * COLS * BLOCK_K], k, col + rank * COLS);
  } else {
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_N / 64; ++i) {
      if (i % Tile::CLUSTER == rank) load(&shared.b[stage][i * PIECE], col + i * 64, k);
    }
  }
}

// Stages 64 rows of 128 bytes: of T, 64 columns, of fp32, 32. `sums` are those of these columns.
template <typename T>
__device__ inline void stage_piece(uint8_t* piece, const float* sums, bool fp32) {
  const int warp_row = threadIdx.x % WARPGROUP / 32 * 16;
  const int lane_id = threadIdx.x % 32;
  if (fp32) {
    const int row = warp_row + lane_id / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk =
            (j * 2 + lane_id % 4 / 2) ^ row % 8;  // rows of both halves have the same lower bits
        *reinterpret_cast<float2*>(piece + (row + half * 8) * 128 + chunk * 16 + lane_id % 2 * 8) =
            make_float2(sums[j * 4 + half * 2], sums[j * 4 + half * 2 + 1]);
      }
    }
  } else {
    const int row = warp_row + lane_id % 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t fragment[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        alignas(4)
            const T pair[2] = {from_float<T>(sums[j * 4 + i * 2]), from_float<T>(sums[j * 4 + i * 2 + 1])};
        fragment[i] = *reinterpret_cast<const uint32_t*>(pair);
      }
      stmatrix_x4(piece + row * 128 + ((j + lane_id / 16) ^ row % 8) * 16, fragment);
    }
  }
}

// Stores a staged piece of T whose rows the copy engine cannot take, by the word. `to` is its first element.
template <typename T>
__device__ inline void store_piece(T* to, const uint8_t* piece, int64_t N, int rows, int cols) {
  const int lane_id = threadIdx.x % 32;
  const int first_row = threadIdx.x % WARPGROUP / 32 * 16;
  const int last_row = min(rows, first_row + 16);
  for (int row = first_row; row < last_row; ++row) {
    const auto element = [&](int col) {
      constexpr int CHUNK = 16 / sizeof(T);
      return *reinterpret_cast<const T*>(piece + row * 128 + (col / CHUNK ^ row % 8) * 16 +
                                         col % CHUNK * sizeof(T));
    };
    T* line = to + row * N;
    if constexpr (sizeof(T) == 4) {
      if (lane_id < cols) line[lane_id] = element(lane_id);
    } else {
      // Words begin at even addresses, wherever the row does; one element is left at either end.
      const int shift = reinterpret_cast<uintptr_t>(line) / 2 % 2;
      const int col = lane_id * 2 + shift;
      if (col + 1 < cols) {
        alignas(4) const T pair[2] = {element(col), element(col + 1)};
        *reinterpret_cast<uint32_t*>(line + col) = *reinterpret_cast<const uint32_t*>(pair);
      } else if (col < cols) {
        line[col] = element(col);
      }
      if (shift && lane_id == 0) line[0] = element(0);
    }
  }
}

// Adds up what the blocks that share a tile have summed, in their order. True for the last of them to come,
// which then holds the tile's sums.
template <typename Tile>
__device__ inline bool join_splits(const MatmulProblem& problem, unsigned* ticket, float (&sums)[Tile::SUMS],
                                   int tile, int split) {
  constexpr int VECTORS = Tile::SUMS / 4;
  const int consumer = threadIdx.x / WARPGROUP - 1;
  const int thread = threadIdx.x % WARPGROUP;
  const auto partial = [&](int of_split) {
    return problem.partials +
           ((int64_t{tile} * problem.splits + of_split) * Tile::CONSUMERS + consumer) * VECTORS * WARPGROUP +
           thread;
  };
  float4* mine = partial(split);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    __stcg(mine + i * WARPGROUP, make_float4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]));
  __threadfence();                              // before the ticket is taken
  named_barrier_sync(1 + consumer, WARPGROUP);  // for the warpgroup's partial sums
  if (thread == 0) *ticket = atomicAdd(&problem.counters[tile * Tile::CONSUMERS + consumer], 1);
  named_barrier_sync(1 + consumer, WARPGROUP);  // for the ticket
  if (*ticket != problem.splits - 1) return false;

  __threadfence();  // after the ticket that says that all have come
  if (thread == 0) problem.counters[tile * Tile::CONSUMERS + consumer] = 0;
#pragma unroll
  for (int i = 0; i < Tile::SUMS; ++i) sums[i] = 0.0f;
  for (int of_split = 0; of_split < problem.splits; ++of_split) {
    const float4* theirs = partial(of_split);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const float4 sum = __ldcg(theirs + i * WARPGROUP);
      sums[i * 4] += sum.x;
      sums[i * 4 + 1] += sum.y;
      sums[i * 4 + 2] += sum.z;
      sums[i * 4 + 3] += sum.w;
    }
  }
  return true;
}

// Writes a warpgroup's 64 rows of a tile to out, in pieces, two of which may be on their way.
template <typename Tile>
__device__ inline void store_tile(const MatmulProblem& problem, uint8_t (*pieces)[PIECE_BYTES],
                                  const float (&sums)[Tile::SUMS], int row, int col) {
  using T = typename Tile::T;
  const int consumer = threadIdx.x / WARPGROUP - 1;
  const bool leader = threadIdx.x % WARPGROUP == 0;
  const auto store = [&](auto zero, bool fp32) {
    using Out = decltype(zero);
    constexpr int COLS = 128 / sizeof(Out);
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_N / COLS; ++i) {
      const int first = col + i * COLS;
      if (first >= problem.N) break;
      uint8_t* piece = pieces[i % 2];
      // For the store from this piece; where a tile begins, for all, as the last one may have ended with
      // either.
      if (leader) i == 0 ? bulk_wait_group_read<0>() : bulk_wait_group_read<1>();
      named_barrier_sync(1 + consumer, WARPGROUP);  // for that wait, and for all that read this piece
      stage_piece<T>(piece, &sums[i * COLS / 2], fp32);
      fence_proxy_async();                          // the copy engine is to see the piece
      named_barrier_sync(1 + consumer, WARPGROUP);  // for all of the piece
      if (problem.out_mapped) {
        if (leader) {
          tma_store(&problem.out, piece, first, row);
          bulk_commit_group();
        }
      } else {
        store_piece(static_cast<Out*>(problem.out_matrix) + row * problem.N + first, piece, problem.N,
                    static_cast<int>(min(problem.M - row, int64_t{64})),
                    static_cast<int>(min(problem.N - first, int64_t{COLS})));
      }
    }
  };
  if (row >= problem.M) return;
  if (problem.out_fp32) {
    store(0.0f, true);
  } else {
    store(T{}, false);
  }
}

// The whole kernel. THREADS threads, the first warpgroup of which fetches.
template <typename Tile>
__device__ void matmul_blocks(const MatmulProblem& problem) {
  using T = typename Tile::T;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be the warp's
  const MatmulWalk<Tile> walk(problem);
  const int first_unit = blockIdx.x / Tile::CLUSTER;
  const int unit_step = gridDim.x / Tile::CLUSTER;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&problem.a);
    prefetch_tensor_map(&problem.b);
    if (problem.out_mapped) prefetch_tensor_map(&problem.out);
    for (int stage = 0; stage < Tile::STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], Tile::CONSUMERS * Tile::CLUSTER);
    }
    fence_mbarrier_init();
  }
  // For the barriers, in all blocks of the cluster.
  if constexpr (Tile::CLUSTER == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }

  // The next kernel of the stream sets itself up while this one runs, as this one did; nothing of what the
  // kernel before wrote, or reads, has been touched.
  if (threadIdx.x == 0) allow_dependent_launch();
  wait_for_previous_kernel();
  int stage = 0;
  uint32_t phase = 0;
  const auto advance = [&] {
    if (++stage == Tile::STAGES) {
      stage = 0;
      phase ^= 1;
    }
  };
  if (warpgroup == 0) {
    if constexpr (Tile::CONSUMERS == 2) give_back_registers<40>();
    if constexpr (Tile::CONSUMERS == 3) give_back_registers<32>();
    if (threadIdx.x == 0) {
      for (int unit = first_unit; unit < walk.units; unit += unit_step) {
        const auto work = walk.at(unit);
        for (int k = work.k_begin; k < work.k_end; ++k) {
          mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);  // for the stage to be read by all
          fetch<Tile>(problem, shared, stage, work.row, work.col, k * BLOCK_K);
          advance();
        }
      }
    }
  } else {
    if constexpr (Tile::CONSUMERS == 2) take_registers<232>();
    if constexpr (Tile::CONSUMERS == 3) take_registers<160>();
    const int consumer = warpgroup - 1;
    const int thread = threadIdx.x % WARPGROUP;
    const auto release = [&](int read_stage) {
      if constexpr (Tile::CLUSTER == 1) {
        if (thread == 0) mbarrier_arrive(&shared.empty[read_stage]);
      } else {
        if (thread < Tile::CLUSTER) mbarrier_arrive_in(&shared.empty[read_stage], thread);
      }
    };
    const uint64_t a_tile = wgmma_tile(&shared.a[0][consumer * PIECE_BYTES / sizeof(T)]);
    const uint64_t b_tile = wgmma_tile(shared.b[0], PIECE_BYTES);
    constexpr int A_STEP = Tile::A_COL ? 16 * 128 / 16 : 16 * sizeof(T) / 16;  // 16 of K, in 16 bytes
    constexpr int B_STEP = Tile::B_COL ? 16 * sizeof(T) / 16 : 16 * 128 / 16;

    auto next = walk.at(first_unit);
    for (int unit = first_unit; unit < walk.units; unit += unit_step) {
      const auto work = next;
      float sums[Tile::SUMS];
      for (int k = work.k_begin; k < work.k_end; ++k) {
        mbarrier_wait_parity(&shared.full[stage], phase);  // for the stage's tiles
        const uint64_t a = a_tile + stage * (sizeof(shared.a[0]) / 16);
        const uint64_t b = b_tile + stage * (sizeof(shared.b[0]) / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step) {
          wgmma_m64k16<Tile::BLOCK_N, T, Tile::A_COL, Tile::B_COL>(sums, a + step * A_STEP, b + step * B_STEP,
                                                                   k > work.k_begin || step > 0);
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();  // for the stage before
        if (k > work.k_begin) release(stage == 0 ? Tile::STAGES - 1 : stage - 1);
        advance();
      }
      next = walk.at(unit + unit_step);  // divisions, in the shadow of the last products
      wgmma_wait_group<0>();             // for the sums
      release(stage == 0 ? Tile::STAGES - 1 : stage - 1);

      if (problem.splits > 1 &&
          !join_splits<Tile>(problem, &shared.ticket[consumer], sums, work.tile, work.split)) {
        continue;
      }
      store_tile<Tile>(problem, shared.out[consumer], sums, work.row + consumer * 64, work.col);
    }
    if (thread == 0) bulk_wait_group_read<0>();  // shared memory must outlive the stores from it
  }
  if constexpr (Tile::CLUSTER > 1) cluster_sync();  // and the other blocks' copies into it and arrivals at it
}
