// Which tile matmul_bf16's v19 takes for a product, and into how many parts it splits K. Host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>

#include "few_rows_choice.h"

// The compiled tiles, and the outputs that each is compiled for. Any tile stores plain output, of T by the
// copy engine; other: also rows that the copy engine cannot take.
struct FittedShape : ClusterTile {
  bool other;
};
constexpr FittedShape FITTED_SHAPES[] = {
    {{128, 256, 2}, true},  {{128, 256, 1}, false}, {{128, 224, 2}, true},  {{128, 192, 1}, false},
    {{128, 176, 2}, false}, {{128, 160, 2}, true},  {{128, 128, 2}, false}, {{128, 128, 1}, true},
    {{64, 128, 1}, true},   {{64, 64, 1}, true},
};

// Fitted to trials of drawn products with every tile and split on an H200 that were not kept.
constexpr RoundsModel FITTED = {.launch = 4620,
                                .cluster = 1110,
                                .lines = 60,
                                .unaligned = {1.3, 1.9},
                                .sm_bytes = 157,
                                .sm_unaligned = {1.9, 2.75},
                                .least = 225,
                                .rows_64 = 1.15,
                                .hidden = 0.64,
                                .sums = 84,
                                .joined = 3180,
                                .sums_joined = 58};

// A choice of FITTED_SHAPES, and the cycles that it should take; these are infinite where no tile is
// compiled.
struct FittedChoice {
  Choice tile;
  double cycles;
};

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
      const double cycles = rounds_cycles(FITTED, gpu, product, shape, splits);
      if (cycles < best.cycles)
        best = {{i, static_cast<int>(splits == 1 ? tiles : tiles - left), splits}, cycles};
    }
  }
  return best;
}
