// reduction_nd v04_vectorized: loads of 16 bytes in both directions, with four of a thread in flight.
//
// Change:   along a reduced axis, a lane loads packs of its output's runs; a run that does not start at a
//           multiple of 16 bytes has a ragged first and last pack. Down columns, a thread has as many
//           neighbouring columns as a pack holds. The threads of a block are divided between columns and rows
//           by the sizes of both.
// Why:      one load instruction brings eight bf16 values instead of one. By Little's law the bytes in flight
//           set the rate, and a thread has 64 of them before it waits.
// Error:    along rows at most (R / (8 lanes) + 14) eps/2 sum|x|, down columns (R / 8 + 8) eps/2 sum|x|.
// Counter:  time falls along rows, and dram_share rises. Down 4096 columns the tiles are only 16, fewer than
//           SMs, and the time rises, which v05 mends.
// Requires: nothing.
// Routes:   along rows: this kernel if runs are contiguous and hold a pack, or four packs if misaligned
//           down columns: this kernel if every row of columns is a whole number of aligned packs
//           else: v03's kernels
// Twin:     triton-kernels/reduction/reduction_nd/v04_vectorized.py
#include "packs.cuh"

void reduction_nd_v03_by_layout(const ReductionNdArgs& args);

namespace {

template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v04_vectorized_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                       float divisor) {
  __shared__ Total parts[THREADS / 32];
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / tiling.lanes;
  const int lane = threadIdx.x % tiling.lanes;
  const bool exists = output < tiling.kept.count;  // otherwise the thread only joins the shuffles
  const Place place = place_of(tiling.kept, exists ? output : 0);
  Total total = Total::none();
  if (exists)
    add_along<T, true, LOADS>(total, x + place.offset, tiling, Share(tiling, lane, tiling.lanes, LOADS));
  total = tiling.lanes == THREADS ? merge_block<THREADS>(total, parts) : merge_lanes(total, tiling.lanes);
  if (exists && lane == 0) total.template store<T>(out, place.step, divisor);
}

template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v04_vectorized_columns_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                               float divisor) {
  using Parts = ColumnParts<T, true, Total>;
  __shared__ Total parts[Parts::SIZE];
  const int64_t first_pack = static_cast<int64_t>(blockIdx.x) * tiling.columns;
  const int64_t pack = first_pack + threadIdx.x % tiling.columns;
  Total totals[Parts::WIDTH];
#pragma unroll
  for (Total& total : totals) total = Total::none();
  if (pack < tiling.kept.count) {
    add_down<T, true>(totals, x + place_of(tiling.kept, pack).offset, tiling,
                      Share(tiling, threadIdx.x / tiling.columns, THREADS / tiling.columns, LOADS));
  }
  Parts::put(parts, totals);
  __syncthreads();  // waits for the totals of all rows
  // Coalesced stores: neighbouring threads write neighbouring outputs.
  const int width = tiling.columns * Parts::WIDTH;
  for (int column = threadIdx.x; column < width; column += THREADS) {
    const int64_t its_pack = first_pack + column / Parts::WIDTH;
    if (its_pack >= tiling.kept.count) break;
    const int64_t at = place_of(tiling.kept, its_pack).step + column % Parts::WIDTH * tiling.column_step;
    Parts::merged(parts, column, width).template store<T>(out, at, divisor);
  }
}

}  // namespace

void reduction_nd_v04_vectorized(const ReductionNdArgs& args) {
  const int64_t sms = multiprocessor_count();
  dispatch_totals(args, [&](auto zero, auto total) {
    using T = decltype(zero);
    using Total = decltype(total);
    const Tiling tiling = tiling_of<T>(args, sms);
    if (tiling.tiles == 0) return;
    if (!tiling.wide) return reduction_nd_v03_by_layout(args);
    const auto kernel = tiling.columns ? reduction_nd_v04_vectorized_columns_kernel<T, Total>
                                       : reduction_nd_v04_vectorized_kernel<T, Total>;
    kernel<<<tiling.tiles, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), args.out, tiling,
                                                      divisor_of(args, args.reduced_axes()));
  });
  CUDA_CHECK(cudaGetLastError());
}
