// The kernel of matmul_bf16's v15 and v19, and of linear's v01 and v03, a template over tile and layouts. The
// main loop is v13_tma_store's. New: the last tiles may be split along K; out may be fp32; a tile is stored
// while the next one is multiplied; and the kernel may be set up before the one before it ends. Terms:
// docs/glossary.md.
#pragma once

#include "lib/ptx/wgmma.cuh"
#include "lib/ptx/wgmma_between.cuh"
#include "store.cuh"
#include "tile.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// One thread fetches the tiles of a stage.
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
  // Multicast: every block of a cluster fetches its share of B's tile for all blocks.
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
    for (int i = 0; i < Tile::B_LOADED / 64; ++i) {
      if (i % Tile::CLUSTER == rank) load(&shared.b[stage][i * PIECE], col + i * 64, k);
    }
  }
}

// The kernel's body. Of its THREADS threads the first warpgroup fetches, the others multiply.
template <typename Tile>
__device__ void matmul_blocks(const typename Tile::Problem& problem) {
  using T = typename Tile::T;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int first_unit = blockIdx.x / Tile::CLUSTER;
  const int unit_step = gridDim.x / Tile::CLUSTER;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&problem.a);
    prefetch_tensor_map(&problem.b);
    if (problem.out_mapped) prefetch_tensor_map(&problem.out);
    if constexpr (Tile::PLAIN_OUT && Tile::REST > 0) prefetch_tensor_map(&problem.out_rest);
    for (int stage = 0; stage < Tile::STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], Tile::CONSUMERS * Tile::CLUSTER);
    }
    fence_mbarrier_init();
  }
  // For the mbarriers to be initialised, in all blocks of the cluster.
  if constexpr (Tile::CLUSTER == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }

  // Programmatic dependent launch: from here on the next kernel of the stream may be set up beside this one,
  // as this one was beside the kernel before it. Nothing that the kernel before wrote, or reads, may be
  // touched above this wait.
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
    if constexpr (Tile::CONSUMERS == 2) give_back_registers<24>();
    if constexpr (Tile::CONSUMERS == 3) give_back_registers<32>();
    if (threadIdx.x == 0) {
      for (int unit = first_unit; unit < problem.units; unit += unit_step) {
        const Unit work = unit_at<Tile>(problem, unit);
        for (int k = work.k_begin; k < work.k_end; ++k) {
          mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);  // for the stage to be read by all
          fetch<Tile>(problem, shared, stage, work.row, work.col, k * BLOCK_K);
          advance();
        }
      }
    }
  } else {
    if constexpr (Tile::CONSUMERS == 2) take_registers<240>();
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

    TileStore<Tile> tile_store(problem, shared.out[consumer]);
    Unit work = unit_at<Tile>(problem, first_unit);
    for (int unit = first_unit; unit < problem.units; unit += unit_step) {
      float sums[Tile::SUMS];
      for (int k = work.k_begin; k < work.k_end; ++k) {
        mbarrier_wait_parity(&shared.full[stage], phase);  // for the stage's tiles
        const uint64_t a = a_tile + stage * (sizeof(shared.a[0]) / 16);
        const uint64_t b = b_tile + stage * (sizeof(shared.b[0]) / 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step) {
          const bool accumulate = k > work.k_begin || step > 0;
          if constexpr (Tile::REST == 0) {
            wgmma_m64k16<Tile::BLOCK_N, T, Tile::A_COL, Tile::B_COL>(sums, a + step * A_STEP,
                                                                     b + step * B_STEP, accumulate);
          } else {
            wgmma_m64k16_between<Tile::BLOCK_N, T, Tile::A_COL, Tile::B_COL>(sums, a + step * A_STEP,
                                                                             b + step * B_STEP, accumulate);
          }
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();  // for the stage before
        if (k > work.k_begin) release(stage == 0 ? Tile::STAGES - 1 : stage - 1);
        if (k == work.k_begin + FLUSH_AT) tile_store.template flush<0>();
        if (k == work.k_begin + 2 * FLUSH_AT) tile_store.template flush<2>();
        advance();
      }
      // While the last products run: finishes the store of the tile before, and finds the next tile.
      tile_store.begin(work.row + consumer * 64, work.col);
      if (unit + unit_step < problem.units) work = unit_at<Tile>(problem, unit + unit_step);
      wgmma_wait_group<0>();  // for the sums
      wgmma_hold(sums);
      release(stage == 0 ? Tile::STAGES - 1 : stage - 1);
      if (unit < problem.whole || join_splits<Tile>(problem, &shared.ticket[consumer], sums, unit))
        tile_store.store(sums);
    }
    tile_store.finish();
  }
  __syncwarp();                                     // the producer's lanes have diverged
  if constexpr (Tile::CLUSTER > 1) cluster_sync();  // it must outlive other blocks' copies and arrivals
}

#endif  // 9.0a
