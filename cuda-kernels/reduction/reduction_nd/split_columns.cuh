// Columns whose rows are split over several blocks, as in v05, by loads of single elements or in another way.
// Terms: docs/glossary.md.
#pragma once

#include "lib/load.cuh"
#include "lib/ticket.cuh"
#include "tiling.cuh"

constexpr int RESIDENT = 4;  // blocks an SM with LOADS
constexpr int COUNTERS = ZEROED_BYTES / sizeof(unsigned);

// How a thread adds a column, with DEPTH loads of single elements in flight.
template <typename T>
struct Straight {
  using Layout = Tiling;
  static constexpr int WIDTH = 1;

  // How many columns a thread has.
  __device__ static int count(const Tiling&, int64_t) { return WIDTH; }

  template <int DEPTH, typename Total>
  __device__ static void add(Total (&totals)[WIDTH], const T* x, int64_t column, const Tiling& tiling,
                             const Share& share) {
    const T* const first = x + place_of(tiling.kept, column).offset;
#pragma unroll 1
    for (int64_t row = share.unit; row < share.end; row += share.round) {
      Load<T, Access::ELEMENTS> loads[DEPTH];
      int64_t place[DEPTH];
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        const int64_t at = row + i * share.stride;
        const Offsets found = place_of(tiling.reduced, at < share.end ? at : row);
        place[i] = found.step;
        loads[i].from(first + found.offset, at < share.end);
      }
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        if (row + i * share.stride >= share.end) break;
        totals[0].add(loads[i][0], place[i]);
      }
    }
  }
};

// Down columns: the totals of all threads of a block in shared memory, [rows, columns of the tile].
template <int WIDTH, typename Total>
struct ColumnParts {
  static constexpr int SIZE = THREADS * WIDTH;

  __device__ static void put(Total* parts, const Total (&totals)[WIDTH]) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) parts[threadIdx.x * WIDTH + j] = totals[j];
  }
  // The total of one of the tile's `width` columns, merged over the rows in order.
  __device__ static Total merged(const Total* parts, int column, int width) {
    Total total = parts[column];
    for (int at = column + width; at < SIZE; at += width) total.merge(parts[at]);
    return total;
  }
};

// Reduces the columns of a tile. workspace: [tiles, parts, columns of a tile]; out: of Out.
template <typename T, typename Way, int DEPTH, typename Out = T, typename Total>
__device__ void reduce_columns(const T* x, void* out, const typename Way::Layout& tiling, float divisor,
                               Total* workspace, unsigned* counters) {
  constexpr int WIDTH = Way::WIDTH;
  using Parts = ColumnParts<WIDTH, Total>;
  __shared__ Total parts[Parts::SIZE];
  const int64_t first_pack = static_cast<int64_t>(blockIdx.x) * tiling.columns;
  const int64_t pack = first_pack + threadIdx.x % tiling.columns;
  Total totals[WIDTH];
#pragma unroll
  for (Total& total : totals) total = Total::none();
  if (pack < tiling.kept.count) {
    const int rows = THREADS / tiling.columns;
    const Share share(tiling, threadIdx.x / tiling.columns, rows, DEPTH, blockIdx.y, gridDim.y);
    Way::template add<DEPTH>(totals, x, pack, tiling, share);
  }
  Parts::put(parts, totals);
  __syncthreads();  // waits for the totals of all rows
  const int width = tiling.columns * WIDTH;
  if (gridDim.y > 1) {
    workspace += static_cast<int64_t>(blockIdx.x) * gridDim.y * width;
    for (int column = threadIdx.x; column < width; column += THREADS) {
      workspace[static_cast<int64_t>(blockIdx.y) * width + column] = Parts::merged(parts, column, width);
    }
    if (!is_last(counters)) return;
  }
  // Coalesced stores: neighbouring threads write neighbouring outputs.
  for (int column = threadIdx.x; column < width; column += THREADS) {
    const int64_t its_pack = first_pack + column / WIDTH;
    if (its_pack >= tiling.kept.count) break;
    if (column % WIDTH >= Way::count(tiling, its_pack)) continue;
    const int64_t at = place_of(tiling.kept, its_pack).step + column % WIDTH * tiling.column_step;
    Total total = gridDim.y > 1 ? workspace[column] : Parts::merged(parts, column, width);
#pragma unroll 8
    for (unsigned other = 1; gridDim.y > 1 && other < gridDim.y; ++other) {
      total.merge(workspace[static_cast<int64_t>(other) * width + column]);
    }
    store<Out>(total, out, at, divisor);
  }
}
