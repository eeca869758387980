// Few columns whose rows continue in memory: several rows are side by side as one row, a fold. Its columns
// repeat the outputs, and a second launch merges their totals. Terms: docs/glossary.md.
#pragma once

#include "shifted_columns.cuh"

struct Fold {
  Tiling tiling;     // columns: those of a fold; rows: folds
  int64_t together;  // rows of a fold
  int64_t rest;      // rows behind the last whole fold
};

// Whether columns are narrower than a warp's packs, and have folds enough. A fold is as wide as several
// tiles, so that few parts of a tile are merged.
template <typename T>
bool are_columns_folded(const Tiling& tiling) {
  constexpr int64_t SIZE = Pack<T>::SIZE, MANY_FOLDS = 16;
  const Axis &columns = tiling.kept.inner(), &rows = tiling.reduced.inner();
  return tiling.columns > 0 && !tiling.wide && tiling.kept.rank == 1 && tiling.reduced.rank == 1 &&
         columns.stride == 1 && rows.stride == columns.size && columns.size < 32 * SIZE &&
         rows.size * columns.size >= MANY_FOLDS * 4 * THREADS * SIZE;
}

template <typename T>
Fold folded(const Tiling& narrow) {
  constexpr int64_t SIZE = Pack<T>::SIZE;
  const int64_t columns = narrow.kept.count, rows = narrow.units();
  Fold fold{.tiling = narrow};
  fold.together = 4 * THREADS / columns * SIZE;  // so that a fold is whole packs
  fold.rest = rows % fold.together;
  const int64_t width = columns * fold.together;
  fold.tiling.kept.set_inner({width, 1, 1});
  fold.tiling.reduced.set_inner({rows / fold.together, width, 0});
  fold.tiling.column_step = 1;
  return fold;
}

// The output of a block, merged in a fixed order. totals: [together, columns], fp32; rest: the rows behind
// the last fold.
template <typename T, typename Total>
__device__ void merge_folded(const float* totals, const T* rest, void* out, int columns, int together,
                             int rest_rows, int64_t step, float divisor) {
  __shared__ Total parts[THREADS / 32];
  const int column = blockIdx.x;
  Total total = Total::none();
#pragma unroll 4
  for (int row = threadIdx.x; row < together; row += THREADS) {
    total.merge({totals[row * columns + column]});
  }
#pragma unroll 4
  for (int row = threadIdx.x; row < rest_rows; row += THREADS) total.add(rest[row * columns + column], 0);
  total = merge_block<THREADS>(total, parts);
  if (threadIdx.x == 0) store<T>(total, out, column * step, divisor);
}
