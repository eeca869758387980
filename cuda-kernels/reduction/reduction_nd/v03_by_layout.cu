// reduction_nd v03_by_layout: threads lie along the axis that is contiguous in memory.
//
// Change:   if the contiguous axis is reduced, an output gets a few lanes, a warp or a block, as many threads
//           as its elements keep busy. If it is kept, a lane gets a column, and the block's eight warps share
//           the rows. Addresses are found by products with the reciprocals of the axes' sizes; a lone axis
//           needs none.
// Why:      in both cases a warp reads whole lines. An output of few elements needs no barrier and leaves no
//           lane idle. A contiguous tensor has one or two merged axes of either kind left, however many it
//           had.
// Error:    at most (R / 8 + 8) eps/2 sum|x| down columns, less along rows.
// Counter:  time falls along rows and down columns, and most over a middle axis.
// Requires: nothing. If no axis is contiguous, threads lie along the axis with the smallest stride.
// Twin:     triton-kernels/reduction/reduction_nd/v03_by_layout.py
#include <algorithm>

#include "lib/walk.cuh"
#include "totals.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ELEMENTS = 4;             // a lane; an output gets more lanes, up to a warp, beyond that
constexpr int64_t MOST_OF_WARP = 1024;  // elements of an output up to which a warp takes it

// Along a reduced axis: `lanes` threads share an output, a power of two up to 32 or the whole block.
template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v03_by_layout_kernel(const T* x, void* out, const __grid_constant__ Axes kept,
                                      const __grid_constant__ Axes reduced, int lanes, float divisor) {
  __shared__ Total parts[WARPS];
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / lanes;
  const int lane = threadIdx.x % lanes;
  const bool exists = output < kept.count;  // otherwise the thread only joins the shuffles
  const Offsets place = place_of(kept, exists ? output : 0);
  Total total = Total::none();
#pragma unroll 4  // loads in flight
  for (int64_t index = lane; index < (exists ? reduced.count : 0); index += lanes) {
    const Offsets at = place_of(reduced, index);
    total.add(x[place.offset + at.offset], at.step);
  }
  total = lanes == THREADS ? merge_block<THREADS>(total, parts) : merge_lanes(total, lanes);
  if (exists && lane == 0) store<T>(total, out, place.step, divisor);
}

// Down columns: a lane has a column, and each warp takes every eighth row.
template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v03_by_layout_columns_kernel(const T* x, void* out, const __grid_constant__ Axes kept,
                                              const __grid_constant__ Axes reduced, float divisor) {
  __shared__ Total parts[WARPS][32];
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int64_t output = static_cast<int64_t>(blockIdx.x) * 32 + lane_id;
  const bool exists = output < kept.count;
  const Offsets place = place_of(kept, exists ? output : 0);
  Total total = Total::none();
#pragma unroll 4
  for (int64_t row = warp_id; row < (exists ? reduced.count : 0); row += WARPS) {
    const Offsets at = place_of(reduced, row);
    total.add(x[place.offset + at.offset], at.step);
  }
  parts[warp_id][lane_id] = total;
  __syncthreads();  // waits for all warps' totals
  if (warp_id != 0 || !exists) return;
  for (int other = 1; other < WARPS; ++other) total.merge(parts[other][lane_id]);
  store<T>(total, out, place.step, divisor);
}

}  // namespace

void reduction_nd_v03_by_layout(const ReductionNdArgs& args) {
  const Axes &kept = args.kept, &reduced = args.reduced;
  if (kept.count == 0) return;
  const float divisor = args.divisor();
  dispatch_totals(args, [&](auto zero, auto total) {
    using T = decltype(zero);
    using Total = decltype(total);
    const auto* x = static_cast<const T*>(args.x);
    if (along_reduced(kept, reduced)) {
      const int64_t busy = power_of_two_from(cdiv(reduced.count, ELEMENTS));
      const int lanes =
          reduced.count > MOST_OF_WARP ? THREADS : static_cast<int>(std::min(busy, int64_t{32}));
      reduction_nd_v03_by_layout_kernel<T, Total>
          <<<cdiv(kept.count, THREADS / lanes), THREADS, 0, args.stream>>>(x, args.out, kept, reduced, lanes,
                                                                           divisor);
    } else {
      reduction_nd_v03_by_layout_columns_kernel<T, Total>
          <<<cdiv(kept.count, 32), THREADS, 0, args.stream>>>(x, args.out, kept, reduced, divisor);
    }
  });
  CUDA_CHECK(cudaGetLastError());
}
