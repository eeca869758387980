// reduction v01_interleaved: each block sums its elements by a tree whose active threads are picked with a
// modulo.
//
// Change:   none yet, this is where the ladder starts. A block of 256 threads sums 256 elements and writes
//           one; the sums are summed again by further launches until one is left.
// Why:      the textbook's first step (Harris, "Optimizing Parallel Reduction in CUDA", kernel 1). Active
//           threads are scattered over all warps, so every warp executes every level for fewer and fewer
//           lanes, and a barrier follows each: the memory waits.
// Counter:  dram_share stays low; launches is 4 for 2^26 elements.
// Requires: a contiguous tensor of any size and alignment.
// Twin:     triton-kernels/reduction/reduction/v01_interleaved.py
#include <algorithm>
#include <utility>

#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;

// x: [n], sums: [blocks]
template <typename T>
__global__ void __launch_bounds__(THREADS)
    reduction_v01_interleaved_kernel(const T* x, float* sums, int64_t n) {
  __shared__ float tree[THREADS];
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  tree[threadIdx.x] = i < n ? to_float(x[i]) : 0.0f;

  for (int distance = 1; distance < THREADS; distance *= 2) {
    __syncthreads();  // waits for the level below
    if (threadIdx.x % (2 * distance) == 0) tree[threadIdx.x] += tree[threadIdx.x + distance];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = tree[0];
}

void reduction_v01_interleaved(const ReductionArgs& args) {
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
    reduction_v01_interleaved_kernel<<<blocks, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.x), blocks == 1 ? args.out : sums, args.n);
  });
  CUDA_CHECK(cudaGetLastError());
  for (int64_t left = blocks; left > 1; left = cdiv(left, THREADS)) {
    const int64_t grid = cdiv(left, THREADS);
    reduction_v01_interleaved_kernel<<<grid, THREADS, 0, args.stream>>>(
        sums, grid == 1 ? args.out : next_sums, left);
    CUDA_CHECK(cudaGetLastError());
    std::swap(sums, next_sums);
  }
}
