// Merges the totals of lanes and of a block's threads. A Total has merge(another total) and of_lane(mask),
// the total of the lane whose number differs by `mask`.
#pragma once

// Merges the totals of `lanes` neighbouring lanes, a power of two up to 32; every lane gets the result. All
// 32 lanes must call.
template <typename Total>
__device__ Total merge_lanes(Total total, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) total.merge(total.of_lane(mask));
  return total;
}

// Merges the totals of all THREADS threads of a block; only thread 0 gets the result. `parts`: THREADS / 32
// totals in shared memory that no thread still reads.
template <int THREADS, typename Total>
__device__ Total merge_block(Total total, Total* parts) {
  total = merge_lanes(total, 32);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = total;
  __syncthreads();  // waits for every warp's total
  if (threadIdx.x == 0) {
    for (int warp_id = 1; warp_id < THREADS / 32; ++warp_id) total.merge(parts[warp_id]);
  }
  return total;
}
