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
constexpr int FLUSH_AT = 2;        // the tile of K beside which the last tile's second half is stored
constexpr int PIECE_BYTES = 8192;  // 64 rows of 128 bytes: what a box copies at least, or an epilogue stages
constexpr int SHARED_BYTES = 232448;  // as much as a block can have

// What a launch is told, by value.
struct MatmulProblem {
  CUtensorMap a, b, out;  // out's is empty unless out_mapped
  void* out_matrix;       // [M, N], row-major
  int64_t M, N;
  int blocks_m, blocks_n;  // tiles of clusters
  int units;               // of clusters: whole tiles, then splits of the others
  int whole;               // tiles that are not split
  int k_blocks;
  int splits;          // of each of the others: blocks that share its K
  bool out_mapped;     // the copy engine can store out
  bool out_fp32;       // else T
  float4* partials;    // [split tiles, splits, a tile's sums]
  unsigned* counters;  // [split tiles, consumers], zero before and after
};

// BLOCK_M x BLOCK_N sums a block; CLUSTER blocks, one below the other, share their tile of B.
template <typename T_, int BLOCK_M_, int BLOCK_N_, int CLUSTER_, bool A_COL_, bool B_COL_, bool PLAIN_OUT_>
struct MatmulTile {
  using T = T_;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int CLUSTER = CLUSTER_;
  static constexpr bool A_COL = A_COL_;  // a is column-major
  static constexpr bool B_COL = B_COL_;
  static constexpr bool PLAIN_OUT = PLAIN_OUT_;  // out is T, and the copy engine can store it

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

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a block computes at a time: a tile, or one of the splits of its K.
struct Unit {
  int row, col;        // of its first element
  int k_begin, k_end;  // in blocks
};

// Whole tiles come first, in grouped order, then the split ones, split by split; all blocks of a cluster have
// the same number.
template <typename Tile>
__device__ inline Unit unit_at(const MatmulProblem& problem, int number) {
  int of_cluster = number;  // the tile's number
  Unit unit = {0, 0, 0, problem.k_blocks};
  if (number >= problem.whole) {
    const int split_tile = (number - problem.whole) / problem.splits;
    const int split = number - problem.whole - split_tile * problem.splits;
    of_cluster = problem.whole + split_tile;
    unit.k_begin = problem.k_blocks * split / problem.splits;
    unit.k_end = problem.k_blocks * (split + 1) / problem.splits;
  }
  const int group = of_cluster / (GROUP_M * problem.blocks_n);
  const int within = of_cluster - group * GROUP_M * problem.blocks_n;
  const int group_rows = min(problem.blocks_m - group * GROUP_M, GROUP_M);
  const int group_col = within / group_rows;
  const int group_row = within - group_col * group_rows;
  const int rank = Tile::CLUSTER == 1 ? 0 : cluster_block();
  unit.row = ((group * GROUP_M + group_row) * Tile::CLUSTER + rank) * Tile::BLOCK_M;
  unit.col = group_col * Tile::BLOCK_N;
  return unit;
}

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

// Rounds a thread's 32 sums of 64 columns to T, two to a word.
template <typename T>
__device__ inline void round_piece(uint32_t (&words)[16], const float* sums) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    alignas(4) const T pair[2] = {from_float<T>(sums[i * 2]), from_float<T>(sums[i * 2 + 1])};
    words[i] = *reinterpret_cast<const uint32_t*>(pair);
  }
}

// Stages 64 rows of 64 elements of 2 bytes, swizzled as the copy engine expects.
__device__ inline void stage_piece(uint8_t* piece, const uint32_t (&words)[16]) {
  const int lane_id = threadIdx.x % 32;
  const int row = threadIdx.x % WARPGROUP / 32 * 16 + lane_id % 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // of 16 columns
    const uint32_t fragment[4] = {words[j * 4], words[j * 4 + 1], words[j * 4 + 2], words[j * 4 + 3]};
    stmatrix_x4(piece + row * 128 + ((j * 2 + lane_id / 16) ^ row % 8) * 16, fragment);
  }
}

// The same for 64 rows of 32 sums as they are.
__device__ inline void stage_piece_fp32(uint8_t* piece, const float* sums) {
  const int lane_id = threadIdx.x % 32;
  const int row = threadIdx.x % WARPGROUP / 32 * 16 + lane_id / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {  // 8 columns of the row, and of the eighth row below, which is swizzled alike
    const int chunk = (i / 2 * 2 + lane_id % 4 / 2) ^ row % 8;
    *reinterpret_cast<float2*>(piece + (row + i % 2 * 8) * 128 + chunk * 16 + lane_id % 2 * 8) =
        make_float2(sums[i * 2], sums[i * 2 + 1]);
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
                                   int unit) {
  constexpr int VECTORS = Tile::SUMS / 4;
  const int consumer = threadIdx.x / WARPGROUP - 1;
  const int thread = threadIdx.x % WARPGROUP;
  const int of_cluster = (unit - problem.whole) / problem.splits;
  const int split = unit - problem.whole - of_cluster * problem.splits;
  const int tile = of_cluster * Tile::CLUSTER + (Tile::CLUSTER == 1 ? 0 : cluster_block());
  const auto partial = [&](int of_split) {
    return problem.partials +
           ((int64_t{tile} * problem.splits + of_split) * Tile::CONSUMERS + consumer) * VECTORS * WARPGROUP +
           thread;
  };
  float4* mine = partial(split);
#pragma unroll
  for (int i = 0; i < VECTORS; ++i)
    __stcg(mine + i * WARPGROUP, make_float4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]));
  __threadfence();                                         // before the ticket is taken
  named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP);  // for the warpgroup's partial sums
  if (thread == 0) *ticket = atomicAdd(&problem.counters[tile * Tile::CONSUMERS + consumer], 1);
  named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP);  // for the ticket
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

// A warpgroup's 64 rows of a tile on their way to out, through two pieces of shared memory. The sums,
// rounded, wait in registers until the next tile is being multiplied, and leave two pieces at a time beside
// it, so that the tensor cores wait for no barrier and for no copy.
template <typename Tile>
class TileStore {
  using T = typename Tile::T;
  static constexpr int PIECES = Tile::BLOCK_N / 64;

  const MatmulProblem& problem;
  uint8_t (*const pieces)[PIECE_BYTES];
  uint32_t words[PIECES][16];
  int row = 0, col = 0;  // of the tile
  int stored = PIECES;   // of them, or more

  // Makes the pieces free to be written.
  __device__ void wait_for_pieces() {
    if (threadIdx.x % WARPGROUP == 0) bulk_wait_group_read<0>();  // for the copy engine to have read them
    named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP);  // for that, and for all threads that read them
  }

  __device__ void store_pieces(int count, int first) {
    fence_proxy_async();                                     // the copy engine is to see them
    named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP);  // for all of the pieces
    if (threadIdx.x % WARPGROUP == 0) {
      for (int i = 0; i < count; ++i) {
        if (first + i * 64 < problem.N) tma_store(&problem.out, pieces[i], first + i * 64, row);
      }
      bulk_commit_group();
    }
  }

  // One piece after the other: fp32, or rows that the copy engine cannot take.
  template <typename Out>
  __device__ void store_slowly(const float (&sums)[Tile::SUMS]) {
    constexpr int COLS = 128 / sizeof(Out);
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_N / COLS; ++i) {
      const int first = col + i * COLS;
      if (first >= problem.N) break;
      wait_for_pieces();
      if constexpr (sizeof(Out) == 4) {
        stage_piece_fp32(pieces[0], &sums[i * COLS / 2]);
      } else {
        round_piece<T>(words[0], &sums[i * COLS / 2]);
        stage_piece(pieces[0], words[0]);
      }
      if (problem.out_mapped) {
        store_pieces(1, first);
      } else {
        named_barrier_sync(threadIdx.x / WARPGROUP, WARPGROUP);  // for all of the piece
        store_piece(static_cast<Out*>(problem.out_matrix) + row * problem.N + first, pieces[0], problem.N,
                    static_cast<int>(min(problem.M - row, int64_t{64})),
                    static_cast<int>(min(problem.N - first, int64_t{COLS})));
      }
    }
  }

 public:
  __device__ TileStore(const MatmulProblem& problem, uint8_t (*pieces)[PIECE_BYTES])
      : problem(problem), pieces(pieces) {}

  // Finishes the tile before, and says where the next one belongs.
  __device__ void begin(int tile_row, int tile_col) {
    flush<0>();
    flush<2>();
    row = tile_row;
    col = tile_col;
    // Values of their own from here on: without this, ptxas 13.0 takes the next tile's column for this one's.
    asm volatile("" : "+r"(row), "+r"(col));
  }

  __device__ void store(const float (&sums)[Tile::SUMS]) {
    if (row >= problem.M) return;
    if constexpr (Tile::PLAIN_OUT) {
#pragma unroll
      for (int i = 0; i < PIECES; ++i) round_piece<T>(words[i], &sums[i * 32]);
      stored = 0;
    } else if (problem.out_fp32) {
      store_slowly<float>(sums);
    } else {
      store_slowly<T>(sums);
    }
  }

  // Stores two pieces from FIRST on, if it is their turn.
  template <int FIRST>
  __device__ void flush() {
    if constexpr (Tile::PLAIN_OUT && FIRST < PIECES) {
      if (stored != FIRST) return;
      constexpr int COUNT = FIRST + 1 < PIECES ? 2 : 1;
      wait_for_pieces();
#pragma unroll
      for (int i = 0; i < COUNT; ++i) stage_piece(pieces[i], words[FIRST + i]);
      store_pieces(COUNT, col + FIRST * 64);
      stored += 2;
    }
  }

  __device__ void finish() {
    flush<0>();
    flush<2>();
    if (threadIdx.x % WARPGROUP == 0)
      bulk_wait_group_read<0>();  // shared memory must outlive the copies from it
  }
};

// The whole kernel. THREADS threads, the first warpgroup of which fetches.
template <typename Tile>
__device__ void matmul_blocks(const MatmulProblem& problem) {
  using T = typename Tile::T;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be the warp's
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
          wgmma_m64k16<Tile::BLOCK_N, T, Tile::A_COL, Tile::B_COL>(sums, a + step * A_STEP, b + step * B_STEP,
                                                                   k > work.k_begin || step > 0);
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();  // for the stage before
        if (k > work.k_begin) release(stage == 0 ? Tile::STAGES - 1 : stage - 1);
        if (k == work.k_begin + FLUSH_AT) tile_store.template flush<0>();
        if (k == work.k_begin + 2 * FLUSH_AT) tile_store.template flush<2>();
        advance();
      }
      // In the shadow of the last products: the tile before has left, and the next one's place is known.
      tile_store.begin(work.row + consumer * 64, work.col);
      if (unit + unit_step < problem.units) work = unit_at<Tile>(problem, unit + unit_step);
      wgmma_wait_group<0>();  // for the sums
      release(stage == 0 ? Tile::STAGES - 1 : stage - 1);
      if (unit < problem.whole || join_splits<Tile>(problem, &shared.ticket[consumer], sums, unit))
        tile_store.store(sums);
    }
    tile_store.finish();
  }
  if constexpr (Tile::CLUSTER > 1) cluster_sync();  // and the other blocks' copies into it and arrivals at it
}

#endif  // 9.0a
