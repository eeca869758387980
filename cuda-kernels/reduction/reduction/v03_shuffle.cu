// reduction v03_shuffle: lanes of a warp add up through registers, by shuffles.
//
// Change:   a warp's 32 elements are summed by five shuffles; shared memory only carries the warps' sums to
//           the first warp, which sums them the same way.
// Why:      one barrier instead of eight, and no trip through shared memory a level (Luitjens, "Faster
//           Parallel Reductions on Kepler"). A thread still has a single load of 2 or 4 bytes in flight.
// Counter:  time and instructions fall, the barrier's stall with them; sectors_per_load stays 4.
// Requires: a contiguous tensor of any size and alignment.
// Twin:     none, tl.sum takes shuffles inside a warp by itself.
#include <algorithm>
#include <utility>

#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

static_assert(WARPS <= 32, "one warp sums the warps' sums");

// x: [n], sums: [blocks]
template <typename T>
__global__ void __launch_bounds__(THREADS) reduction_v03_shuffle_kernel(const T* x, float* sums, int64_t n) {
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const float value = i < n ? to_float(x[i]) : 0.0f;

  __shared__ float warp_sums[WARPS];
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const float of_warp = warp_sum(value);
  if (lane_id == 0) warp_sums[warp_id] = of_warp;
  __syncthreads();  // waits for the sums of all warps
  if (warp_id == 0) {
    const float of_block = warp_sum(lane_id < WARPS ? warp_sums[lane_id] : 0.0f);
    if (lane_id == 0) sums[blockIdx.x] = of_block;
  }
}

void reduction_v03_shuffle(const ReductionArgs& args) {
  // A launch cannot overwrite its input, as its blocks run in any order: the sums of odd and of even launches
  // lie in two places, one behind the other.
  const int64_t blocks = std::max(cdiv(args.n, THREADS), int64_t{1});
  if (args.workspace == nullptr) {
    *args.workspace_bytes = (blocks + cdiv(blocks, THREADS)) * sizeof(float);
    return;
  }
  float* sums = static_cast<float*>(args.workspace);
  float* next_sums = sums + blocks;

  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    reduction_v03_shuffle_kernel<<<blocks, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x),
                                                                      blocks == 1 ? args.out : sums, args.n);
  });
  CUDA_CHECK(cudaGetLastError());
  for (int64_t left = blocks; left > 1; left = cdiv(left, THREADS)) {
    const int64_t grid = cdiv(left, THREADS);
    reduction_v03_shuffle_kernel<<<grid, THREADS, 0, args.stream>>>(sums, grid == 1 ? args.out : next_sums,
                                                                    left);
    CUDA_CHECK(cudaGetLastError());
    std::swap(sums, next_sums);
  }
}
