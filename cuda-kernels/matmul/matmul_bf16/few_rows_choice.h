// Which tile matmul_bf16's v18 takes for a product, between how many blocks it splits K, and whether v15's
// tiles are better. Host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>

#include "choice.h"
#include "lib/common.cuh"
#include "rounds.h"

// The compiled tiles: lines of the wide operand and of the other one.
struct FewRowsShape {
  int wide, few;
};
constexpr FewRowsShape FEW_ROWS_SHAPES[] = {{64, 8},    {64, 16},   {64, 32},   {64, 64},  {64, 128},
                                            {128, 128}, {128, 256}, {192, 128}, {192, 192}};

// How many blocks of a tile an SM holds at once: two where the tile is small, so that one loads while the
// other begins or ends.
constexpr int few_rows_blocks_per_sm(FewRowsShape shape) { return shape.few <= 64 ? 2 : 1; }

// A tile, and the blocks that share its K: `blocks` of a cluster, `clusters` of a tile.
struct FewRowsChoice {
  bool transposed;  // the few lines are a's rows, else b's columns
  int shape;        // of FEW_ROWS_SHAPES
  int clusters, blocks;
  bool repacked;  // the few lines, which run across K
  double cycles;  // that it should take
};

// The model's constants, for v18 and for v15, in cycles: fitted to trials of drawn products on an H200 that
// were not kept.
struct Model {
  double launch;       // until a kernel computes, and after its last tile
  double lines;        // of 128 bytes, that L2 delivers to all SMs in a cycle
  double sm_bytes;     // that an SM takes in a cycle
  double unaligned;    // lines of L2 behind one that does not begin at a multiple of 128 bytes
  double hidden;       // this share of the shorter of two overlapping times shows
  double sums;         // to store 1024 sums of a block
  double joined;       // more, where a tile's K is split
  double sums_joined;  // likewise, for 1024 sums
  double clusters;     // likewise, until a share's last block knows that it is the last
};
constexpr Model NARROW = {2500, 56, 67, 1.8, 0.57, 900, 1560, 405, 3200};  // v18's tiles of up to 64 columns
constexpr Model BROAD = {6000, 56, 95, 1.6, 0.43, 300, 580, 115, 7200};    // its other tiles
constexpr RoundsModel V15 = {.launch = 4900,
                             .cluster = 0,
                             .lines = 90,
                             .unaligned = {1.6, 1.6},
                             .sm_bytes = 120,
                             .sm_unaligned = {1.6, 1.6},
                             .least = 0,
                             .rows_64 = 1,
                             .hidden = 0.92,
                             .sums = 70,
                             .joined = 3400,
                             .sums_joined = 43};
constexpr double REPACK_CYCLES = 3500;  // to copy few lines that run across K
// A later step is taken if it should need this share of the time, or less.
constexpr double BETTER_SHARE = 0.95;

// Clusters of 1 to 8 blocks that 132 SMs hold at once, a block an SM, as the driver tells of an H200.
constexpr int MOST_CLUSTERS[] = {132, 66, 39, 30, 22, 17, 15, 15};

// The tile of v15's choice.
inline ClusterTile tile_of(const Choice& choice) {
  const Shape& shape = SHAPES[choice.shape];
  return {shape.block_m, shape.block_n, shape.cluster};
}

// The cycles of v15's choice.
inline double v15_cycles(const GpuRates& gpu, const FewRowsProduct& product, const Choice& choice) {
  return rounds_cycles(V15, gpu, product, tile_of(choice), choice.splits);
}

// The cycles of one of v18's choices.
inline double v18_cycles(const GpuRates& gpu, const FewRowsProduct& product, const FewRowsChoice& choice) {
  const FewRowsShape& shape = FEW_ROWS_SHAPES[choice.shape];
  const Model& model = shape.few <= 64 ? NARROW : BROAD;
  const int64_t wide = choice.transposed ? product.N : product.M;
  const int64_t few = choice.transposed ? product.M : product.N;
  const bool wide_aligned = in_whole_lines(choice.transposed ? product.b_pitch : product.a_pitch);
  const bool few_aligned = in_whole_lines(choice.transposed ? product.a_pitch : product.b_pitch);
  const int splits = choice.clusters * choice.blocks;
  const int64_t all = cdiv(wide, shape.wide) * cdiv(few, shape.few) * splits;
  const int64_t clusters = std::max<int64_t>(1, int64_t{MOST_CLUSTERS[choice.blocks - 1]} * gpu.sms / 132);
  const int64_t most = clusters * choice.blocks * few_rows_blocks_per_sm(shape);
  const int64_t steps = cdiv(cdiv(product.K, BLOCK_K), splits);
  const double lines = shape.wide * (wide_aligned ? 1.0 : model.unaligned) +
                       std::min<int64_t>(few, shape.few) * (few_aligned ? 1.0 : model.unaligned);
  const double sums = shape.wide * shape.few / 1024.0;
  double finish = sums * model.sums / choice.blocks;
  if (choice.blocks > 1) finish += model.joined + sums * model.sums_joined;
  if (choice.clusters > 1) finish += model.clusters;
  const auto round = [&](int64_t blocks) {
    const int64_t of_sm = cdiv(blocks, gpu.sms);
    return steps * std::max({of_sm * shape.wide * shape.few / 32.0, blocks * lines / model.lines,
                             of_sm * lines * 128 / model.sm_bytes}) +
           finish;
  };
  const int64_t rounds = all / most;
  const int64_t left = all % most;
  double inside = rounds * round(most);
  if (left > 0) inside += round(left);
  // Where an SM holds two blocks, the next one begins when either ends: halfway between whole rounds and
  // none.
  if (rounds > 0 && left > 0 && few_rows_blocks_per_sm(shape) == 2)
    inside = (inside + (rounds + static_cast<double>(left) / most) * round(most)) / 2;
  return overlapped(model.launch, model.hidden, inside, dram_cycles(gpu, product));
}

// v18's choice that should take the fewest cycles; those are infinite where it has no tile for the sizes. Few
// lines that run across K are repacked.
inline FewRowsChoice choose_few_rows(const GpuRates& gpu, const FewRowsProduct& product) {
  constexpr int CLUSTERS[] = {1, 2, 3, 4, 6, 8};
  constexpr int MOST_BLOCKS = 8;
  constexpr int MOST_FEW = 4096;  // more lines give so many tiles that none is split
  const int64_t k_blocks = cdiv(product.K, BLOCK_K);
  FewRowsChoice best = {.cycles = std::numeric_limits<double>::infinity()};
  for (const bool transposed : {true, false}) {
    const int64_t few = transposed ? product.M : product.N;
    const int64_t wide = transposed ? product.N : product.M;
    const bool along_k = transposed ? product.a_along_k : product.b_along_k;
    if (few > MOST_FEW || (few > 64 && few > wide)) continue;
    for (int i = 0; i < static_cast<int>(std::size(FEW_ROWS_SHAPES)); ++i) {
      const FewRowsShape& shape = FEW_ROWS_SHAPES[i];
      // Up to 64 lines have the narrowest tile with room for them.
      const bool narrowest = few <= shape.few && (shape.few == 8 || few > shape.few / 2);
      if (few <= 64 ? shape.few > 64 || !narrowest : shape.few <= 64) continue;
      const int64_t tiles = cdiv(wide, shape.wide) * cdiv(few, shape.few);
      const int64_t most = int64_t{gpu.sms} * few_rows_blocks_per_sm(shape);
      for (const int clusters : CLUSTERS) {
        for (int blocks = 1; blocks <= MOST_BLOCKS; ++blocks) {
          const int splits = clusters * blocks;
          if (splits > 1 && (splits > k_blocks || tiles * splits > most)) break;
          FewRowsChoice choice = {transposed, i, clusters, blocks, few <= 64 && !along_k, 0};
          choice.cycles = v18_cycles(gpu, product, choice);
          if (choice.repacked) choice.cycles += REPACK_CYCLES;
          if (choice.cycles < best.cycles) best = choice;
        }
      }
    }
  }
  return best;
}
