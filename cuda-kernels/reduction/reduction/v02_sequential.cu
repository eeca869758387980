// reduction v02_sequential: the tree's active threads are the first ones, without gaps.
//
// Change:   a level of the tree adds its upper half onto its lower half: the distance between two operands
//           halves from level to level instead of doubling.
// Why:      whole warps fall idle instead of every warp running every level for a few lanes, and the modulo
//           is gone (Harris, "Optimizing Parallel Reduction in CUDA", kernel 3). A warp's lanes read
//           neighbouring words, so packing them costs no bank conflicts, as it does in Harris' kernel 2. The
//           barrier a level and the single load a thread remain.
// Counter:  instructions and time fall; launches stays 4 for 2^26 elements.
// Requires: a contiguous tensor of any size and alignment.
// Twin:     none, tl.sum lays out a block's tree by itself.
#include <algorithm>
#include <utility>

#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;

static_assert((THREADS & (THREADS - 1)) == 0, "the tree halves down to one thread");

// x: [n], sums: [blocks]
template <typename T>
__global__ void __launch_bounds__(THREADS)
    reduction_v02_sequential_kernel(const T* x, float* sums, int64_t n) {
  __shared__ float tree[THREADS];
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  tree[threadIdx.x] = i < n ? to_float(x[i]) : 0.0f;

  for (int distance = THREADS / 2; distance > 0; distance /= 2) {
    __syncthreads();  // waits for the level below
    if (threadIdx.x < distance) tree[threadIdx.x] += tree[threadIdx.x + distance];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = tree[0];
}

void reduction_v02_sequential(const ReductionArgs& args) {
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
    reduction_v02_sequential_kernel<<<blocks, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.x), blocks == 1 ? args.out : sums, args.n);
  });
  CUDA_CHECK(cudaGetLastError());
  for (int64_t left = blocks; left > 1; left = cdiv(left, THREADS)) {
    const int64_t grid = cdiv(left, THREADS);
    reduction_v02_sequential_kernel<<<grid, THREADS, 0, args.stream>>>(sums, grid == 1 ? args.out : next_sums,
                                                                       left);
    CUDA_CHECK(cudaGetLastError());
    std::swap(sums, next_sums);
  }
}
