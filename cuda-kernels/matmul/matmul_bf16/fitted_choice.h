// Which tile matmul_bf16's v19 takes for a product, and into how many parts it splits K. Host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>

#include "few_rows_choice.h"

// The compiled tiles, and the outputs that each is compiled for. Any tile stores plain output, of T by the
// copy engine; other: also rows that the copy engine cannot take.
struct FittedShape {
  int block_m, block_n, cluster;
  bool other;
};
constexpr FittedShape FITTED_SHAPES[] = {
    {128, 256, 2, true},  {128, 256, 1, false}, {128, 224, 2, true},  {128, 192, 1, false},
    {128, 176, 2, false}, {128, 160, 2, true},  {128, 128, 2, false}, {128, 128, 1, true},
    {64, 128, 1, true},   {64, 64, 1, true},
};

// A choice of FITTED_SHAPES, and the cycles that it should take; these are infinite where no tile is
// compiled.
struct FittedChoice {
  Choice tile;
  double cycles;
};

// By how much lines cost more that do not begin at multiples of 128 bytes, and more still where they do not
// begin at multiples of 32, the sectors that L2 delivers.
inline double unaligned_cost(int64_t pitch, double sectors, double halves) {
  return pitch % 64 == 0 ? 1.0 : pitch % 16 == 0 ? sectors : halves;
}

// The cycles that a choice should take. The numbers are fitted to trials of drawn products with every tile
// and split on an H200 that were not kept.
inline double fitted_cycles(const GpuRates& gpu, const FewRowsProduct& product, const FittedShape& shape,
                            int splits) {
  constexpr double LAUNCH_CYCLES = 4620;   // until a kernel computes, and after its last tile
  constexpr double CLUSTER_CYCLES = 1110;  // more, until a cluster's blocks have met
  constexpr double LINES_A_CYCLE = 60;     // of 128 bytes, that L2 delivers to all SMs
  constexpr double LINES_SECTORS = 1.3, LINES_HALVES = 1.9;
  constexpr double SM_BYTES_A_CYCLE = 157;
  constexpr double SM_SECTORS = 1.9, SM_HALVES = 2.75;
  constexpr double LEAST_CYCLES = 225;  // of a block of K, however small the tile
  constexpr double ROWS_64 = 1.15;      // products of a tile with one warpgroup of rows take longer
  constexpr double HIDDEN = 0.64;       // this share of the shorter of two overlapping times shows
  constexpr double SUMS_CYCLES = 84;    // to store 1024 sums of a block
  constexpr double JOIN_CYCLES = 3180;  // until the last block of a split tile knows that it is the last
  constexpr double SPLIT_CYCLES = 58;   // to write or to read 1024 sums of a split
  const int64_t k_blocks = cdiv(product.K, BLOCK_K);
  const int64_t most = gpu.sms / shape.cluster;
  const int64_t tiles = cdiv(product.M, shape.block_m * shape.cluster) * cdiv(product.N, shape.block_n);
  const double a_rows = std::min<int64_t>(shape.block_m, product.M);
  const double b_cols = std::min<int64_t>(shape.block_n, product.N);
  const double a_lines = a_rows * unaligned_cost(product.a_pitch, LINES_SECTORS, LINES_HALVES);
  const double b_lines = b_cols * unaligned_cost(product.b_pitch, LINES_SECTORS, LINES_HALVES);
  const double sm_lines = a_rows * unaligned_cost(product.a_pitch, SM_SECTORS, SM_HALVES) +
                          b_cols * unaligned_cost(product.b_pitch, SM_SECTORS, SM_HALVES);
  const double products = shape.block_m * shape.block_n / 32.0 * (shape.block_m == 64 ? ROWS_64 : 1.0);
  const double sums = shape.block_m * shape.block_n / 1024.0;
  const auto round = [&](int64_t clusters, int64_t steps) {
    return steps * std::max({products, clusters * (a_lines * shape.cluster + b_lines) / LINES_A_CYCLE,
                             sm_lines * 128 / SM_BYTES_A_CYCLE, LEAST_CYCLES}) +
           sums * SUMS_CYCLES;
  };
  const int64_t left = tiles % most;
  double inside = tiles / most * round(most, k_blocks);
  if (left > 0) inside += round(left * splits, cdiv(k_blocks, splits));
  if (splits > 1) inside += JOIN_CYCLES + (1 + splits) * sums * SPLIT_CYCLES;
  const double dram = dram_cycles(gpu, product);
  return LAUNCH_CYCLES + (shape.cluster > 1 ? CLUSTER_CYCLES : 0) + std::max(inside, dram) +
         HIDDEN * std::min(inside, dram);
}

// The choice that should take the fewest cycles. Tiles that are left over after full rounds of all SMs are
// split along K, if there are SMs for it.
inline FittedChoice choose_fitted(const GpuRates& gpu, const FewRowsProduct& product, bool plain) {
  constexpr int SPLITS[] = {1, 2, 3, 4, 6, 8, 12};
  constexpr int LEAST_K_BLOCKS = 2;  // of a split
  const int64_t k_blocks = cdiv(product.K, BLOCK_K);
  FittedChoice best = {.cycles = std::numeric_limits<double>::infinity()};
  for (int i = 0; i < static_cast<int>(std::size(FITTED_SHAPES)); ++i) {
    const FittedShape& shape = FITTED_SHAPES[i];
    if ((!plain && !shape.other) || shape.cluster > gpu.sms) continue;
    const int64_t most = gpu.sms / shape.cluster;
    const int64_t tiles = cdiv(product.M, shape.block_m * shape.cluster) * cdiv(product.N, shape.block_n);
    const int64_t left = tiles % most;
    for (const int splits : SPLITS) {
      if (splits > 1 && (left == 0 || left * splits > most || k_blocks < splits * LEAST_K_BLOCKS)) break;
      const double cycles = fitted_cycles(gpu, product, shape, splits);
      if (cycles < best.cycles)
        best = {{i, static_cast<int>(splits == 1 ? tiles : tiles - left), splits}, cycles};
    }
  }
  return best;
}
