// Argmax down columns of v06 that are whole packs, if rows come in the order of indices: a thread keeps a
// row's 32-bit number for each column, and finds its index at the end. Terms: docs/glossary.md.
#pragma once

#include "short_columns.cuh"

// How a thread adds the columns of a pack (see reduce_columns).
template <typename T>
struct Counted {
  using Layout = ShiftedTiling;
  static constexpr int WIDTH = Pack<T>::SIZE;

  __device__ static int count(const ShiftedTiling& tiling, int64_t pack) {
    return Shifted<T>::count(tiling, pack);
  }

  // A thread that meets nothing above -inf gives row 0, which is right if nobody does.
  template <int DEPTH>
  __device__ static void add(ArgMax (&totals)[WIDTH], const T* x, int64_t pack, const ShiftedTiling& tiling,
                             const Share& share) {
    const T* const columns = x + place_of(tiling.kept, pack).offset;
    const int64_t row_stride = tiling.reduced.axis[0].stride;
    Running<ArgMax> running[WIDTH];
#pragma unroll 1
    for (int64_t row = share.unit; row < share.end; row += share.round) {
      Load<T, Access::PACKS> loads[DEPTH];
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        const int64_t at = row + i * share.stride;
        loads[i].from(columns + min(at, share.end - 1) * row_stride, at < share.end);
      }
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        const int64_t at = row + i * share.stride;
        if (at >= share.end) break;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) running[j].add(loads[i][j], static_cast<unsigned>(at));
      }
    }
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) totals[j] = running[j].finished(tiling);
  }
};
