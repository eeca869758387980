// Columns whose rows are split over several blocks, of v05 and v06, and the ticket of the last block. Terms:
// docs/glossary.md.
#pragma once

#include "packs.cuh"

constexpr int RESIDENT = 4;  // blocks an SM with LOADS
constexpr int COUNTERS = ZEROED_BYTES / sizeof(unsigned);

// True in the block that writes the last part of the tile; it may then read all parts. All threads must call.
__device__ inline bool is_last(unsigned* counters) {
  __shared__ bool last;
  __syncthreads();  // waits for all threads' writes, which the ticket must follow
  if (threadIdx.x == 0) {
    // PTX ISA, "atom": counter = counter < last ? counter + 1 : 0; returns the old value. Release: the
    // block's earlier writes are visible to later tickets. Acquire: writes before earlier tickets are visible
    // here.
    unsigned ticket;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(ticket)
                 : "l"(&counters[blockIdx.x]), "r"(gridDim.y - 1)
                 : "memory");
    last = ticket == gridDim.y - 1;
  }
  __syncthreads();  // waits for the ticket
  return last;
}

// How a thread adds the columns of a pack, with DEPTH loads in flight: by packs that lie at multiples of 16
// bytes, or by single elements.
template <typename T, Access HOW>
struct Straight {
  using Layout = Tiling;
  static constexpr Access ACCESS = HOW;
  static constexpr int WIDTH = Load<T, ACCESS>::WIDTH;

  // How many columns are in the pack.
  __device__ static int count(const Tiling&, int64_t) { return WIDTH; }

  template <int DEPTH, typename Total>
  __device__ static void add(Total (&totals)[WIDTH], const T* x, int64_t pack, const Tiling& tiling,
                             const Share& share) {
    add_down<T, ACCESS, DEPTH>(totals, x + place_of(tiling.kept, pack).offset, tiling, share);
  }
};

// Reduces the columns of a tile. workspace: [tiles, parts, columns of a tile]; out: of Out.
template <typename T, typename Way, int DEPTH, typename Out = T, typename Total>
__device__ void reduce_columns(const T* x, void* out, const typename Way::Layout& tiling, float divisor,
                               Total* workspace, unsigned* counters) {
  using Parts = ColumnParts<T, Way::ACCESS, Total>;
  __shared__ Total parts[Parts::SIZE];
  const int64_t first_pack = static_cast<int64_t>(blockIdx.x) * tiling.columns;
  const int64_t pack = first_pack + threadIdx.x % tiling.columns;
  Total totals[Parts::WIDTH];
#pragma unroll
  for (Total& total : totals) total = Total::none();
  if (pack < tiling.kept.count) {
    const int rows = THREADS / tiling.columns;
    const Share share(tiling, threadIdx.x / tiling.columns, rows, DEPTH, blockIdx.y, gridDim.y);
    Way::template add<DEPTH>(totals, x, pack, tiling, share);
  }
  Parts::put(parts, totals);
  __syncthreads();  // waits for the totals of all rows
  const int width = tiling.columns * Parts::WIDTH;
  if (gridDim.y > 1) {
    workspace += static_cast<int64_t>(blockIdx.x) * gridDim.y * width;
    for (int column = threadIdx.x; column < width; column += THREADS) {
      workspace[static_cast<int64_t>(blockIdx.y) * width + column] = Parts::merged(parts, column, width);
    }
    if (!is_last(counters)) return;
  }
  // Coalesced stores: neighbouring threads write neighbouring outputs.
  for (int column = threadIdx.x; column < width; column += THREADS) {
    const int64_t its_pack = first_pack + column / Parts::WIDTH;
    if (its_pack >= tiling.kept.count) break;
    if (column % Parts::WIDTH >= Way::count(tiling, its_pack)) continue;
    const int64_t at = place_of(tiling.kept, its_pack).step + column % Parts::WIDTH * tiling.column_step;
    Total total = gridDim.y > 1 ? workspace[column] : Parts::merged(parts, column, width);
#pragma unroll 4
    for (unsigned other = 1; gridDim.y > 1 && other < gridDim.y; ++other) {
      total.merge(workspace[static_cast<int64_t>(other) * width + column]);
    }
    total.template store<Out>(out, at, divisor);
  }
}
