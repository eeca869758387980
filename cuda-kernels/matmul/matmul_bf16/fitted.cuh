// The kernel of matmul_bf16's v19 and of linear's v03: v15's, with tiles of 160, 176 and 224 columns, too.
// Terms: docs/glossary.md.
#pragma once

#include "fitted_choice.h"
#include "lib/ptx/wgmma.cuh"
#include "lib/ptx/wgmma_between.cuh"
#include "store.cuh"
#include "tile.cuh"

// The kernel's argument, by value.
struct FittedProblem : MatmulProblem {
  // out in boxes of a tile's narrower last piece; empty unless the tile has one, and PLAIN_OUT.
  CUtensorMap out_rest;
};

// BLOCK_M x BLOCK_N sums a block; CLUSTER blocks, one below the other, share their tile of B.
template <typename T_, FittedShape SHAPE, bool A_COL_, bool B_COL_, bool PLAIN_OUT_>
struct FittedTile {
  using T = T_;
  using Problem = FittedProblem;
  using Epilogue = PlainEpilogue;
  static constexpr int BLOCK_M = SHAPE.block_m;
  static constexpr int BLOCK_N = SHAPE.block_n;
  static constexpr int CLUSTER = SHAPE.cluster;
  static constexpr bool A_COL = A_COL_;  // a is column-major
  static constexpr bool B_COL = B_COL_;
  static constexpr bool PLAIN_OUT = PLAIN_OUT_;  // the copy engine can store out

  static constexpr int PIECES = cdiv(BLOCK_N, 64);  // of 64 columns, but for the last one
  static constexpr int REST = BLOCK_N % 64;         // columns of the last one, if it has fewer
  static constexpr int CONSUMERS = BLOCK_M / 64;    // warpgroups that multiply 64 rows each
  static constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
  static constexpr int SUMS = BLOCK_N / 2;  // of a thread
  // B's columns come in pieces of 64 where they are neighbours, even if a piece has more than are multiplied.
  static constexpr int B_LOADED = B_COL ? BLOCK_N : PIECES * 64;
  static constexpr int STAGE_BYTES = (BLOCK_M + B_LOADED) * BLOCK_K * sizeof(T);
  static constexpr int STAGING_BYTES = CONSUMERS * 2 * PIECE_BYTES;
  static constexpr int STAGES = std::min(8, (SHARED_BYTES - STAGING_BYTES - 256) / STAGE_BYTES);

  struct Shared {
    T a[STAGES][BLOCK_M * BLOCK_K];   // [BLOCK_M, BLOCK_K], or pieces [BLOCK_K, 64] if A_COL
    T b[STAGES][BLOCK_K * B_LOADED];  // pieces [BLOCK_K, 64], or [BLOCK_N, BLOCK_K] if B_COL
    uint8_t out[CONSUMERS][2][PIECE_BYTES];
    uint64_t full[STAGES];   // complete when a stage's tiles have come
    uint64_t empty[STAGES];  // complete when all consumers, those of the whole cluster, have read it
    unsigned ticket[CONSUMERS];
  };
  static_assert(BLOCK_N / CLUSTER % 8 == 0, "a share of B's tile is whole patterns of the swizzle");
  static_assert(PIECES <= 4, "two pieces are stored at a time, twice");
  static_assert(sizeof(Shared) <= SHARED_BYTES && STAGES >= 3);
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Stores a warpgroup's 64 rows of a tile through two pieces of shared memory, as v15's TileStore does; the
// last piece may have fewer columns. An epilogue's `store` takes the maps of whole pieces and of the last
// one, too, and the matrix.
template <typename Tile>
class FittedStore {
  using T = typename Tile::T;
  static constexpr int PIECES = Tile::PIECES;

  const typename Tile::Problem& problem;
  uint8_t (*const pieces)[PIECE_BYTES];
  typename Tile::Epilogue epilogue;
  uint32_t words[PIECES][16] = {};  // of the last piece, the first ones are used
  int row = 0, col = 0;             // of the tile
  int stored = PIECES;              // pieces of the tile; from PIECES on none waits

  static constexpr bool is_rest(int piece) { return Tile::REST > 0 && piece == PIECES - 1; }
  static constexpr int columns_of(int piece) { return is_rest(piece) ? Tile::REST : 64; }

  __device__ void sync() { named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP); }

  // Rounds a thread's sums of a piece.
  template <int PIECE>
  __device__ void round_one(const float (&sums)[Tile::SUMS]) {
#pragma unroll
    for (int i = 0; i < columns_of(PIECE) / 4; ++i) {
      alignas(4) const T pair[2] = {from_float<T>(sums[PIECE * 32 + i * 2]),
                                    from_float<T>(sums[PIECE * 32 + i * 2 + 1])};
      words[PIECE][i] = *reinterpret_cast<const uint32_t*>(pair);
    }
  }

  __device__ void round(const float (&sums)[Tile::SUMS]) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (round_one<I>(sums), ...);
    }(std::make_integer_sequence<int, PIECES>{});
  }

  // Stages the narrower last piece, whose rows are as long as they are wide and not swizzled.
  __device__ void stage_rest(uint8_t* piece) {
    const int lane_id = threadIdx.x % 32;
    const int of_row = threadIdx.x % WARPGROUP / 32 * 16 + lane_id % 16;
#pragma unroll
    for (int j = 0; j < Tile::REST / 16; ++j) {
      const uint32_t (&rest)[16] = words[PIECES - 1];
      const uint32_t fragment[4] = {rest[j * 4], rest[j * 4 + 1], rest[j * 4 + 2], rest[j * 4 + 3]};
      stmatrix_x4(piece + of_row * Tile::REST * 2 + (j * 2 + lane_id / 16) * 16, fragment);
    }
  }

  // Waits until the pieces may be written again.
  __device__ void wait_for_pieces() {
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_group_read<0>();  // for the copy engine to have read them
    sync();  // for that, and for all threads that read them
  }

  // Stores two of the rounded pieces, if there are as many, by the copy engine.
  template <int FIRST>
  __device__ void store_rounded(const CUtensorMap* map, const CUtensorMap* rest) {
    if constexpr (FIRST < PIECES) {
      constexpr int COUNT = FIRST + 1 < PIECES ? 2 : 1;
      wait_for_pieces();
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        is_rest(FIRST + i) ? stage_rest(pieces[i]) : stage_piece(pieces[i], words[FIRST + i]);
      }
      fence_proxy_async();  // shows the pieces to the copy engine
      sync();               // for all of the pieces
      if (threadIdx.x % WARPGROUP == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          const int first = col + (FIRST + i) * 64;
          if (first < problem.N) tma_store(is_rest(FIRST + i) ? rest : map, pieces[i], first, row);
        }
        bulk_commit_group();
      }
    }
  }

  // Stores one piece after the other at once, to rows that the copy engine cannot take.
  __device__ void store_now(void* matrix) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int first = col + i * 64;
      if (first >= problem.N) break;
      sync();  // for all threads that read the piece before
      stage_piece(pieces[0], words[i]);
      sync();  // for all of the piece
      store_piece(static_cast<T*>(matrix) + row * problem.N + first, pieces[0], problem.N,
                  static_cast<int>(min(problem.M - row, int64_t{64})),
                  static_cast<int>(min(problem.N - first, int64_t{columns_of(i)})));
    }
  }

 public:
  __device__ FittedStore(const typename Tile::Problem& problem, uint8_t (*pieces)[PIECE_BYTES])
      : problem(problem), pieces(pieces) {}

  // Finishes the store of the tile before, and notes the next tile's place.
  __device__ void begin(int tile_row, int tile_col) {
    flush<0>();
    flush<2>();
    row = tile_row;
    col = tile_col;
    // Hides where these values come from: without this, ptxas 13.0 uses the next tile's column for this
    // one's.
    asm volatile("" : "+r"(row), "+r"(col));
    epilogue.begin(problem, col);
  }

  __device__ void store(float (&sums)[Tile::SUMS]) {
    if (row >= problem.M) return;
    // An epilogue may store the sums once on the way.
    epilogue.apply(problem, sums, [&](const CUtensorMap* map, const CUtensorMap* rest, void* matrix) {
      round(sums);
      if constexpr (Tile::PLAIN_OUT) {
        store_rounded<0>(map, rest);
        store_rounded<2>(map, rest);
      } else {
        store_now(matrix);
      }
    });
    round(sums);
    if constexpr (Tile::PLAIN_OUT) {
      stored = 0;
    } else {
      store_now(problem.out_matrix);
    }
  }

  // Stores two pieces from FIRST on, if it is their turn.
  template <int FIRST>
  __device__ void flush() {
    if (!Tile::PLAIN_OUT || stored != FIRST) return;
    store_rounded<FIRST>(&problem.out, &problem.out_rest);
    stored += 2;
  }

  __device__ void finish() {
    flush<0>();
    flush<2>();
    if (threadIdx.x % WARPGROUP == 0)
      bulk_wait_group_read<0>();  // shared memory must outlive the copies from it
  }
};

// One thread fetches the tiles of a stage.
template <typename Tile>
__device__ inline void fetch_fitted(const MatmulProblem& problem, typename Tile::Shared& shared, int stage,
                                    int row, int col, int k) {
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
__device__ void fitted_blocks(const typename Tile::Problem& problem) {
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
    if (Tile::PLAIN_OUT && Tile::REST > 0) prefetch_tensor_map(&problem.out_rest);
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
    if (threadIdx.x == 0) {
      for (int unit = first_unit; unit < problem.units; unit += unit_step) {
        const Unit work = unit_at<Tile>(problem, unit);
        for (int k = work.k_begin; k < work.k_end; ++k) {
          mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);  // for the stage to be read by all
          fetch_fitted<Tile>(problem, shared, stage, work.row, work.col, k * BLOCK_K);
          advance();
        }
      }
    }
  } else {
    if constexpr (Tile::CONSUMERS == 2) take_registers<240>();
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

    FittedStore<Tile> tile_store(problem, shared.out[consumer]);
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
