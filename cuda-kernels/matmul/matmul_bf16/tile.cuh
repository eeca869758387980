// The tiles of matmul_bf16's v15: their shapes, and which tile a block computes when. Terms:
// docs/glossary.md.
#pragma once

#include <algorithm>

#include "args.h"
#include "lib/ptx/hopper.cuh"

constexpr int BLOCK_K = 64;        // 128 bytes, a row of the swizzle
constexpr int WARPGROUP = 128;     // threads
constexpr int GROUP_M = 8;         // rows of clusters' tiles that are walked column by column
constexpr int FLUSH_AT = 2;        // the block of K beside which the first half of the tile before is stored
constexpr int PIECE_BYTES = 8192;  // 64 rows of 128 bytes: the smallest box of a copy, and a staged piece
constexpr int SHARED_BYTES = 232448;  // as much as a block can have

// The kernel's argument, by value.
struct MatmulProblem {
  CUtensorMap a, b, out;  // out's is empty unless out_mapped
  void* out_matrix;       // [M, N], row-major
  int64_t M, N;
  int blocks_m, blocks_n;  // tiles of clusters
  int units;               // work items of clusters: whole tiles, then the splits of the others
  int whole;               // tiles that are not split
  int k_blocks;
  int splits;          // of each split tile: the clusters that share its K
  bool out_mapped;     // the copy engine can store out
  bool out_fp32;       // else T
  float4* partials;    // [split tiles, splits, a tile's sums]
  unsigned* counters;  // [split tiles, consumers], zero before and after
};

// The epilogue: what is done to a thread's sums of a tile before the store. Here, nothing.
struct PlainEpilogue {
  // Called while the last products of a tile that begins at column `col` run.
  __device__ void begin(const MatmulProblem&, int col) {}
  // Called when all sums are complete. `store(map, matrix, rest)` rounds them and stores them as they are;
  // map is nullptr where the copy engine cannot store, and rest that of a narrower last piece, if the tile
  // has one.
  template <int SUMS, typename Store>
  __device__ void apply(const MatmulProblem&, float (&sums)[SUMS], Store store) {}
};

// BLOCK_M x BLOCK_N sums a block; CLUSTER blocks, one below the other, share their tile of B.
template <typename T_, int BLOCK_M_, int BLOCK_N_, int CLUSTER_, bool A_COL_, bool B_COL_, bool PLAIN_OUT_>
struct MatmulTile {
  using T = T_;
  using Problem = MatmulProblem;
  using Epilogue = PlainEpilogue;
  static constexpr int BLOCK_M = BLOCK_M_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr int CLUSTER = CLUSTER_;
  static constexpr bool A_COL = A_COL_;  // a is column-major
  static constexpr bool B_COL = B_COL_;
  static constexpr bool PLAIN_OUT = PLAIN_OUT_;  // out is T, and the copy engine can store it

  static constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that multiply 64 rows each
  static constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
  static constexpr int SUMS = BLOCK_N / 2;    // of a thread
  static constexpr int WHOLE = BLOCK_N / 64;  // pieces of 64 columns
  static constexpr int REST = BLOCK_N % 64;   // columns of a narrower last piece
  // B's columns come in pieces of 64 where they are neighbours, even if a piece has more than are multiplied.
  static constexpr int B_LOADED = B_COL ? BLOCK_N : cdiv(BLOCK_N, 64) * 64;
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
  static_assert(sizeof(Shared) <= SHARED_BYTES && STAGES >= 3);
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// What a block computes at a time: a tile, or one of the splits of its K.
struct Unit {
  int row, col;        // of its first element
  int k_begin, k_end;  // in blocks
};

// The unit of that number. Whole tiles come first, in grouped order, then the splits of the split tiles, tile
// by tile; all blocks of a cluster have the same number.
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

#endif  // 9.0a
