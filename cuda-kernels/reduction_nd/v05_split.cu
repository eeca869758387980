// reduction_nd v05_split: where outputs are few, several blocks share one's elements.
//
// Change:   as many parts of every tile's units as fill the GPU with blocks. A block writes what it has to a
//           workspace and takes a ticket from its tile's counter; the one with the last ticket merges the
//           parts, always in the same order, and the counter is 0 again. What v04 left to v03 is read by the
//           same kernels, an element a load.
// Why:      the statistics of 64 channels are 64 outputs for 132 SMs, and a sum over all axes is one. With
//           parts these are as fast as any other; one launch and no atomics on values, so that every run
//           gives the same bits.
// Error:    as v04's for the elements of a part, and a rounding more for each part: at most
//           (R / (8 parts) + parts + 14) eps/2 sum|x|.
// Counter:  time stays where there are tiles enough, and falls to 0.007 of v04's where there is one.
// Requires: nothing. The counters are 0 at the start and again at the end.
// Twin:     triton-kernels/reduction_nd/v05_split.py
#include "packs.cuh"

namespace {

constexpr int BLOCKS_PER_SM = 4;  // that are resident: 1024 threads with 64 bytes each on their way

// What a block takes: its part of a tile's units.
struct Part {
  int64_t begin, end;

  __device__ Part(const Tiling& tiling)
      : begin(blockIdx.y * cdiv(tiling.reduced.count, gridDim.y)),
        end(min(begin + cdiv(tiling.reduced.count, gridDim.y), tiling.reduced.count)) {}
};

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
template <typename T, bool WIDE, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v05_split_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling, float divisor,
                                  Total* workspace, unsigned* counters) {
  __shared__ Total parts[THREADS / 32];
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / tiling.lanes;
  const int lane = threadIdx.x % tiling.lanes;
  const bool exists = output < tiling.kept.count;  // or only takes part in the shuffles
  const Place place = place_of(tiling.kept, exists ? output : 0);
  const Part part(tiling);
  Total total = Total::none();
  add_along<T, WIDE>(total, x + place.offset, tiling, part.begin + lane, exists ? part.end : 0, tiling.lanes);
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
  const Part part(tiling);
  Total totals[Parts::WIDTH];
#pragma unroll
  for (Total& total : totals) total = Total::none();
  if (pack < tiling.kept.count) {
    add_down<T, WIDE>(totals, x + place_of(tiling.kept, pack).offset, tiling,
                      part.begin + threadIdx.x / tiling.columns, part.end, THREADS / tiling.columns);
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

// Parts of every tile, so that blocks fill the GPU and each thread has units left. More tiles than that have
// a counter each are never split.
int64_t parts_of(const Tiling& tiling, int64_t sms) {
  if (tiling.columns == 0 && tiling.lanes < THREADS) return 1;
  const int64_t most = cdiv(tiling.units(), static_cast<int64_t>(tiling.sharing()) * LOADS);
  return std::max(std::min(sms * BLOCKS_PER_SM / tiling.tiles, most), int64_t{1});
}

template <typename T, bool WIDE, typename Total>
void launch(const ReductionNdArgs& args, const Tiling& tiling, int64_t parts) {
  static_assert(ZEROED_BYTES / sizeof(unsigned) >= 2048, "for half of 4 blocks on each of 1024 SMs");
  const int64_t width = tiling.columns * Load<T, WIDE>::WIDTH;
  const int64_t totals = tiling.tiles * parts * std::max(width, int64_t{1});
  auto* workspace = parts > 1 ? static_cast<Total*>(args.memory->workspace(totals * sizeof(Total))) : nullptr;
  auto* counters = parts > 1 ? static_cast<unsigned*>(args.memory->zeroed()) : nullptr;
  const auto kernel = tiling.columns ? reduction_nd_v05_split_columns_kernel<T, WIDE, Total>
                                     : reduction_nd_v05_split_kernel<T, WIDE, Total>;
  const dim3 grid(tiling.tiles, parts);
  kernel<<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), args.out, tiling,
                                            divisor_of(args, args.reduced_axes()), workspace, counters);
}

}  // namespace

void reduction_nd_v05_split(const ReductionNdArgs& args) {
  const int64_t sms = multiprocessor_count();
  dispatch_totals(args, [&](auto zero, auto total) {
    using T = decltype(zero);
    using Total = decltype(total);
    const Tiling tiling = tiling_of<T>(args, sms);
    if (tiling.tiles == 0) return;
    const int64_t parts = parts_of(tiling, sms);
    tiling.wide ? launch<T, true, Total>(args, tiling, parts) : launch<T, false, Total>(args, tiling, parts);
  });
  CUDA_CHECK(cudaGetLastError());
}
