// Columns of v06 by lanes: a thread has a column, or one pack of columns that are whole packs, and many rows
// of it in flight; columns of a tile may be any number. Terms: docs/glossary.md.
#pragma once

#include "lane_tiling.cuh"
#include "short_columns.cuh"

// The total of COUNT loads from BEGIN on of a thread's column number j, by a tree: its chains are shorter
// than a loop's.
template <int BEGIN, int COUNT, typename Total, typename Loads>
__device__ Total total_of(const Loads& loads, int j) {
  if constexpr (COUNT == 1) {
    return {to_float(loads[BEGIN][j])};
  } else {
    Total total = total_of<BEGIN, COUNT / 2, Total>(loads, j);
    total.merge(total_of<BEGIN + COUNT / 2, COUNT / 2, Total>(loads, j));
    return total;
  }
}

// Adds a round's loads, whose rows are `apart`. Argmax needs them in their order.
template <typename T, Access ACCESS, int DEPTH, typename Total>
__device__ void add_round(Running<Total> (&running)[Load<T, ACCESS>::WIDTH],
                          const Load<T, ACCESS> (&loads)[DEPTH], unsigned row, unsigned apart) {
#pragma unroll
  for (int j = 0; j < Load<T, ACCESS>::WIDTH; ++j) {
    if constexpr (std::is_same_v<Total, ArgMax>) {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) running[j].add(loads[i][j], row + i * apart);
    } else {
      running[j].total.merge(total_of<0, DEPTH, Total>(loads, j));
    }
  }
}

// Adds this thread's share of the rows. columns: its first element; `sharing` threads share the rows.
template <typename T, Access ACCESS, int DEPTH, typename Total>
__device__ void add_lane(Running<Total> (&running)[Load<T, ACCESS>::WIDTH], const T* columns,
                         const Tiling& tiling, int group, int sharing) {
  const int64_t stride = tiling.reduced.axis[0].stride, apart = sharing * stride;
  const Share share(tiling, group, sharing, DEPTH, blockIdx.y, gridDim.y);
  const int64_t last = (DEPTH - 1) * sharing, turn = share.round * stride;
  const T* at = columns + share.unit * stride;
  int64_t left = share.end - share.unit;  // rows, with those of other threads
  auto row = static_cast<unsigned>(share.unit);
#pragma unroll 1
  for (left -= last; left > 0; left -= share.round) {
    Load<T, ACCESS> loads[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) loads[i].from(at + i * apart, true);
    add_round<T, ACCESS>(running, loads, row, sharing);
    at += turn;
    row += share.round;
  }
  if (left <= -last) return;
  const int rest = static_cast<int>(left + last);  // of the last round, which is not whole
  Load<T, ACCESS> loads[DEPTH];
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) loads[i].from(at + i * apart, i * sharing < rest);
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) {
    if (i * sharing >= rest) break;
#pragma unroll
    for (int j = 0; j < Load<T, ACCESS>::WIDTH; ++j) running[j].add(loads[i][j], row + i * sharing);
  }
}

// Merges the totals of the groups of threads that share a tile's rows, in a fixed order. Those of group 0 get
// the result. All threads call. shared: [WIDTH, THREADS], which no thread still reads.
template <int WIDTH, typename Total>
__device__ void merge_groups(Total (&totals)[WIDTH], Total (&shared)[WIDTH][THREADS], int columns, int group,
                             int sharing) {
  for (int left = sharing; left > 1;) {
    const int half = (left + 1) / 2;
    if (group >= half && group < left) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) shared[j][threadIdx.x] = totals[j];
    }
    __syncthreads();  // waits for the totals of the upper half
    if (group + half < left) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) totals[j].merge(shared[j][threadIdx.x + half * columns]);
    }
    left = half;
  }
}

// Merges the totals that all blocks of a tile left in the workspace, `step` apart; a thread takes every
// `sharing`-th of them.
template <int WIDTH, typename Total>
__device__ void merge_parts(Total (&totals)[WIDTH], const Total* parts, int64_t step, int group,
                            int sharing) {
  constexpr int AT_ONCE = std::min<int>(128 / (WIDTH * sizeof(Total)), 16);
#pragma unroll
  for (Total& total : totals) total = Total::none();
#pragma unroll 1
  for (unsigned part = group; part < gridDim.y; part += AT_ONCE * sharing) {
    Total found[AT_ONCE][WIDTH];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const unsigned other = part + i * sharing;
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {
        found[i][j] = Total::none();
        if (other < gridDim.y) found[i][j] = parts[other * step + j];
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) totals[j].merge(found[i][j]);
    }
  }
}

// Reduces the columns of a tile. workspace: [tiles, parts, columns of a tile]; out: of Out.
template <typename T, Access ACCESS, int DEPTH, typename Out = T, typename Total>
__device__ void reduce_lanes(const T* x, void* out, const Tiling& tiling, float divisor, Total* workspace,
                             unsigned* counters) {
  constexpr int WIDTH = Load<T, ACCESS>::WIDTH;
  __shared__ Total shared[WIDTH][THREADS];
  const int columns = tiling.columns, sharing = THREADS / columns;
  const int group = threadIdx.x / columns, own = threadIdx.x % columns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * columns + own;
  const bool exists = group < sharing && column < tiling.kept.count;
  Running<Total> running[WIDTH];
  if (exists) {
    const T* const its = x + place_of(tiling.kept, column).offset;
    add_lane<T, ACCESS, DEPTH>(running, its, tiling, group, sharing);
  }
  Total totals[WIDTH];
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) totals[j] = running[j].finished(tiling);
  merge_groups(totals, shared, columns, group, sharing);
  if (gridDim.y > 1) {
    const int64_t step = columns * WIDTH;
    Total* const parts = workspace + blockIdx.x * gridDim.y * step + own * WIDTH;
    if (group == 0) {
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) parts[blockIdx.y * step + j] = totals[j];
    }
    if (!is_last(counters)) return;
    if (group < sharing) merge_parts(totals, parts, step, group, sharing);
    merge_groups(totals, shared, columns, group, sharing);
  }
  if (!exists || group > 0) return;
  const int64_t place = place_of(tiling.kept, column).step;
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) store<Out>(totals[j], out, place + j * tiling.column_step, divisor);
}
