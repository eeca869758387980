// Which tile matmul_bf16's v15 takes for a product, and into how many parts it splits K. Host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>

#include "lib/common.cuh"
#include "tile.cuh"

// The compiled shapes of tiles, and the outputs that each is compiled for. plain: out is T, which the copy
// engine stores; other: any out, stored more slowly.
struct Shape {
  int block_m, block_n, cluster;
  bool plain, other;
};
constexpr Shape SHAPES[] = {
    {128, 256, 2, true, true},  {128, 256, 1, true, false}, {192, 192, 2, false, true},
    {192, 192, 1, false, true}, {128, 192, 2, true, false}, {128, 192, 1, true, false},
    {128, 128, 2, true, false}, {128, 128, 1, true, true},  {64, 256, 1, true, false},
    {128, 64, 1, true, false},  {64, 128, 1, true, true},   {64, 64, 1, true, false},
};

struct Choice {
  int shape;   // of SHAPES
  int whole;   // clusters' tiles that are not split
  int splits;  // of each split tile
};

// The choice that should take the fewest cycles. The model's numbers are rough: from trials on an H100 that
// were not kept. `aligned`: the lines of both operands begin at multiples of 128 bytes; where they do not, L2
// is asked for two lines to deliver one.
inline Choice choose(int64_t M, int64_t N, int64_t K, int sms, bool plain, bool aligned) {
  constexpr double LINES_A_CYCLE = 58;  // that L2 delivers to all SMs
  constexpr double UNALIGNED_LINES_A_CYCLE = 24;
  constexpr double LEAST_CYCLES = 220;     // of a block of K, however small the tile
  constexpr double TILE_CYCLES = 2000;     // before a tile's first products, and after its last ones
  constexpr double CLUSTER_CYCLES = 1000;  // until a cluster's blocks have met
  constexpr double SM_BYTES_A_CYCLE = 64;  // of partial sums, to or from L2
  constexpr double L2_BYTES_A_CYCLE = 2640;
  constexpr double DRAM_BYTES_A_CYCLE = 1900;
  constexpr double HIDDEN_SHARE = 0.2;  // this share of the shorter of two overlapping times shows
  constexpr double CLUSTER_128_FACTOR = 1.15;
  constexpr double JOIN_CYCLES = 3000;  // until the last block knows that it is the last
  constexpr int MOST_SPLITS = 16;
  constexpr int LEAST_K_BLOCKS = 4;  // of a split
  const double dram = 2.0 * (M + N) * K / DRAM_BYTES_A_CYCLE;
  const int64_t k_blocks = cdiv(K, BLOCK_K);
  Choice best = {};
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < static_cast<int>(std::size(SHAPES)); ++i) {
    const Shape& shape = SHAPES[i];
    if (!((plain && shape.plain) || shape.other) || shape.cluster > sms) continue;
    const int64_t tiles = cdiv(M, shape.block_m * shape.cluster) * cdiv(N, shape.block_n);  // of clusters
    const int64_t most = sms / shape.cluster;
    const int64_t rounds = tiles / most;  // full ones
    const int64_t left = tiles % most;
    // Over many rounds blocks drift apart, and what they share no longer comes from L2 at the same time.
    if (shape.cluster == 1 && shape.block_m * shape.block_n > 128 * 128 && cdiv(tiles, most) > 2) continue;
    const auto k_cycles = [&](int64_t clusters) {
      const double mma = shape.block_m * shape.block_n / 32.0 *
                         (shape.cluster > 1 && shape.block_n == 128 ? CLUSTER_128_FACTOR : 1.0);
      const double lines = clusters * shape.cluster * (shape.block_m + shape.block_n / shape.cluster);
      return std::max({mma, lines / (aligned ? LINES_A_CYCLE : UNALIGNED_LINES_A_CYCLE), LEAST_CYCLES});
    };
    const double of_rounds = rounds * (k_blocks * k_cycles(most) + TILE_CYCLES);
    // The tiles left over after full rounds are split as often as there are SMs for, or less.
    for (int splits = 1; splits <= MOST_SPLITS; ++splits) {
      if (splits > 1 && (left * splits > most || k_blocks < splits * LEAST_K_BLOCKS)) break;
      double of_left = 0;
      double of_join = 0;
      if (left > 0) of_left = cdiv(k_blocks, splits) * k_cycles(left * splits) + TILE_CYCLES;
      if (left > 0 && splits > 1) {
        // All blocks write their sums, and the last block of each tile reads those of all.
        const double bytes = shape.block_m * shape.block_n * 4.0;
        const double readers = left * shape.cluster;
        of_join = JOIN_CYCLES + bytes / std::min(SM_BYTES_A_CYCLE, L2_BYTES_A_CYCLE / (readers * splits)) +
                  splits * bytes / std::min(SM_BYTES_A_CYCLE, L2_BYTES_A_CYCLE / readers);
      }
      const double inside = of_rounds + of_left;
      const double cycles = std::max(inside, dram) + HIDDEN_SHARE * std::min(inside, dram) + of_join +
                            (shape.cluster > 1 ? CLUSTER_CYCLES : 0);
      if (cycles < least) {
        least = cycles;
        best = {i, static_cast<int>(splits == 1 ? tiles : tiles - left), splits};
      }
      if (left == 0) break;
    }
  }
  return best;
}
