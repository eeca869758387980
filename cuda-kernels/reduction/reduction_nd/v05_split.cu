// reduction_nd v05_split: where outputs are few, several blocks share one's elements.
//
// Change:   every tile's units are dealt out to parts, round by round. A block writes what it has to a
//           workspace and takes a ticket from its tile's counter; the one with the last ticket merges the
//           parts, always in the same order, and the counter is 0 again. Along rows of a big x a thread has
//           eight loads under way, but for argmax. What v04 left to v03 is read by the same kernels, an
//           element a load.
// Why:      the statistics of 64 channels are 64 outputs for 132 SMs, and a sum over all axes is one. With
//           parts these are as fast as any other; one launch and no atomics on values, so that every run
//           gives the same bits. Were a part a stretch of its own, all would end with the slowest one, and
//           the blocks would read at hundreds of places at once.
// Error:    as v04's for the elements of a part, and a rounding more for each part: at most
//           (R / (8 parts) + parts + 14) eps/2 sum|x|.
// Counter:  time stays where there are tiles enough, and falls to 0.006 of v04's where there is one.
// Requires: nothing. The counters are 0 at the start and again at the end.
// Twin:     triton-kernels/reduction/reduction_nd/v05_split.py
#include <type_traits>

#include "packs.cuh"

namespace {

constexpr int MANY_LOADS = 2 * LOADS;           // of a thread at once, along rows of a big x
constexpr int RESIDENT = 4, MANY_RESIDENT = 3;  // blocks an SM runs at once; with MANY_LOADS
constexpr int MOST = 32;                        // blocks an SM gets, one after the other, of split tiles
constexpr int ROUNDS = 4;                       // that blocks have where an SM gets more than it runs at once
constexpr int COUNTERS = ZEROED_BYTES / sizeof(unsigned);

// Whether all parts of the tile are written, and this block may read them. All threads must call it.
__device__ bool is_last(unsigned* counters) {
  __shared__ bool last;
  __syncthreads();  // for all threads' writes: the ticket of one thread is behind them
  if (threadIdx.x == 0) {
    // PTX ISA, "atom": counter = counter < last ? counter + 1 : 0; returns what it was. As a release it comes
    // after what the block has written, as an acquire it shows what was written before earlier tickets.
    unsigned ticket;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(ticket)
                 : "l"(&counters[blockIdx.x]), "r"(gridDim.y - 1)
                 : "memory");
    last = ticket == gridDim.y - 1;
  }
  __syncthreads();  // for the ticket
  return last;
}

// workspace: [tiles, parts]
template <typename T, bool WIDE, int DEPTH, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v05_split_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling, float divisor,
                                  Total* workspace, unsigned* counters) {
  __shared__ Total parts[THREADS / 32];
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / tiling.lanes;
  const int lane = threadIdx.x % tiling.lanes;
  const bool exists = output < tiling.kept.count;  // or only takes part in the shuffles
  const Place place = place_of(tiling.kept, exists ? output : 0);
  Total total = Total::none();
  if (exists) {
    const Share share(tiling, lane, tiling.lanes, DEPTH, blockIdx.y, gridDim.y);
    add_along<T, WIDE, DEPTH>(total, x + place.offset, tiling, share);
  }
  total = tiling.lanes == THREADS ? merge_block<THREADS>(total, parts) : merge_lanes(total, tiling.lanes);

  if (gridDim.y > 1) {  // an output a block
    workspace += static_cast<int64_t>(blockIdx.x) * gridDim.y;
    if (threadIdx.x == 0) workspace[blockIdx.y] = total;
    if (!is_last(counters)) return;
    total = Total::none();
    for (int other = threadIdx.x; other < gridDim.y; other += THREADS) total.merge(workspace[other]);
    total = merge_block<THREADS>(total, parts);
  }
  if (exists && lane == 0) total.template store<T>(out, place.step, divisor);
}

// workspace: [tiles, parts, columns of a tile]
template <typename T, bool WIDE, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v05_split_columns_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                          float divisor, Total* workspace, unsigned* counters) {
  using Parts = ColumnParts<T, WIDE, Total>;
  __shared__ Total parts[Parts::SIZE];
  const int64_t first_pack = static_cast<int64_t>(blockIdx.x) * tiling.columns;
  const int64_t pack = first_pack + threadIdx.x % tiling.columns;
  Total totals[Parts::WIDTH];
#pragma unroll
  for (Total& total : totals) total = Total::none();
  if (pack < tiling.kept.count) {
    const int rows = THREADS / tiling.columns;
    const Share share(tiling, threadIdx.x / tiling.columns, rows, LOADS, blockIdx.y, gridDim.y);
    add_down<T, WIDE>(totals, x + place_of(tiling.kept, pack).offset, tiling, share);
  }
  Parts::put(parts, totals);
  __syncthreads();  // for all rows' totals
  const int width = tiling.columns * Parts::WIDTH;
  if (gridDim.y > 1) {
    workspace += static_cast<int64_t>(blockIdx.x) * gridDim.y * width;
    for (int column = threadIdx.x; column < width; column += THREADS) {
      workspace[static_cast<int64_t>(blockIdx.y) * width + column] = Parts::merged(parts, column, width);
    }
    if (!is_last(counters)) return;
  }
  // Neighbouring threads write neighbouring outputs.
  for (int column = threadIdx.x; column < width; column += THREADS) {
    const int64_t its_pack = first_pack + column / Parts::WIDTH;
    if (its_pack >= tiling.kept.count) break;
    const int64_t at = place_of(tiling.kept, its_pack).step + column % Parts::WIDTH * tiling.column_step;
    Total total = gridDim.y > 1 ? workspace[column] : Parts::merged(parts, column, width);
#pragma unroll 4
    for (unsigned other = 1; gridDim.y > 1 && other < gridDim.y; ++other) {
      total.merge(workspace[static_cast<int64_t>(other) * width + column]);
    }
    total.template store<T>(out, at, divisor);
  }
}

// Parts of every tile, where tiles alone would not fill the GPU, and none is without units. A tile that is
// split has a counter. A thread has `depth` loads under way at once.
//
// Where memory serves some SMs faster than others, blocks that come and go end closer together than those
// that are all there from the start. So there are more than the GPU holds where a thread has many loads, and
// a part a single total.
int64_t parts_of(const Tiling& tiling, int depth, int64_t sms) {
  if (tiling.columns == 0 && tiling.lanes < THREADS) return 1;
  if (tiling.tiles >= std::min(sms * RESIDENT, int64_t{COUNTERS})) return 1;
  const int64_t round = int64_t{tiling.sharing()} * depth;
  int64_t parts = sms * RESIDENT / tiling.tiles;
  if (depth == MANY_LOADS) parts = std::min(tiling.units() / (ROUNDS * round), sms * MOST / tiling.tiles);
  return std::max(std::min(parts, cdiv(tiling.units(), round)), int64_t{1});
}

template <typename T, typename Total, typename Kernel>
void launch(const ReductionNdArgs& args, const Tiling& tiling, int64_t parts, int width, Kernel* kernel) {
  const int64_t totals = tiling.tiles * parts * width;
  auto* workspace = parts > 1 ? static_cast<Total*>(args.memory->workspace(totals * sizeof(Total))) : nullptr;
  auto* counters = parts > 1 ? static_cast<unsigned*>(args.memory->zeroed()) : nullptr;
  const dim3 grid(tiling.tiles, parts);
  kernel<<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), args.out, tiling,
                                            divisor_of(args, args.reduced_axes()), workspace, counters);
}

template <typename T, bool WIDE, typename Total>
void launch(const ReductionNdArgs& args, const Tiling& tiling, int64_t sms) {
  const auto along = [&](auto depth) {
    launch<T, Total>(args, tiling, parts_of(tiling, depth, sms), 1,
                     reduction_nd_v05_split_kernel<T, WIDE, depth, Total>);
  };
  if (tiling.columns) {
    launch<T, Total>(args, tiling, parts_of(tiling, LOADS, sms), tiling.columns * Load<T, WIDE>::WIDTH,
                     reduction_nd_v05_split_columns_kernel<T, WIDE, Total>);
    return;
  }
  // More loads cost an SM a block. That pays where threads have as much to load, and all blocks that run at
  // once several rounds. Argmax's places take the registers.
  if constexpr (WIDE && !std::is_same_v<Total, ArgMax>) {
    const int64_t at_once = sms * MANY_RESIDENT * THREADS * MANY_LOADS;
    const bool deep = tiling.units() > int64_t{tiling.lanes} * LOADS;
    if (deep && tiling.kept.count * tiling.units() >= ROUNDS * at_once)
      return along(std::integral_constant<int, MANY_LOADS>{});
  }
  along(std::integral_constant<int, LOADS>{});
}

}  // namespace

void reduction_nd_v05_split(const ReductionNdArgs& args) {
  const int64_t sms = multiprocessor_count();
  dispatch_totals(args, [&](auto zero, auto total) {
    using T = decltype(zero);
    using Total = decltype(total);
    const Tiling tiling = tiling_of<T>(args, sms);
    if (tiling.tiles == 0) return;
    tiling.wide ? launch<T, true, Total>(args, tiling, sms) : launch<T, false, Total>(args, tiling, sms);
  });
  CUDA_CHECK(cudaGetLastError());
}
