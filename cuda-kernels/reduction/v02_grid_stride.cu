// reduction v02_grid_stride: a few blocks an SM stride over the vector with wide loads, adding in registers.
//
// Change:   a block takes every so-many-th tile and its threads add vectors of 16 bytes to registers; the
//           block's tree is climbed once, by warp shuffles. A second launch of one block sums the blocks'
//           results, always in the same order: runs agree bit by bit.
// Why:      all but the last few thousand additions happen in registers, without a barrier, while four
//           16-byte loads a thread are in flight.
// Counter:  dram_share should pass 85 %; sectors_per_load rises to 16; launches falls to 2.
// Requires: a contiguous tensor of any size and alignment; the few elements before the first and after the
//           last whole vector are added one by one.
// Twin:     triton-kernels/reduction/v02_grid_stride.py
#include <algorithm>

#include "../common.cuh"
#include "args.h"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int UNROLL = 4;         // independent loads, and accumulators, a thread
constexpr int BLOCKS_PER_SM = 4;  // 1024 threads with 64 bytes each on their way: 64 KiB an SM

static_assert(WARPS <= 32, "one warp sums the warps' sums");
static_assert(UNROLL == 4, "the accumulators are added up pairwise, by name");

// x: [n], sums: [blocks]
template <typename T>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    reduction_v02_grid_stride_kernel(const T* x, float* sums, int64_t n) {
  using Vector = Pack<T>;
  // x = head elements up to the first address that is a multiple of 16, whole vectors, tail elements
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
  const int64_t head = min(n, static_cast<int64_t>((Vector::SIZE - misaligned) % Vector::SIZE));
  const Vector* x_vectors = reinterpret_cast<const Vector*>(x + head);
  const int64_t vectors = (n - head) / Vector::SIZE;
  const int64_t tail = head + vectors * Vector::SIZE;

  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS;
  float totals[UNROLL] = {};

  // Whole tiles of UNROLL rows of THREADS vectors. Their loads are not guarded one by one: with a branch
  // each, every add would come right behind its load.
  constexpr int TILE = THREADS * UNROLL;
  const int64_t tiles = vectors / TILE;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Vector loaded[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) loaded[u] = x_vectors[tile * TILE + u * THREADS + threadIdx.x];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
      for (int k = 0; k < Vector::SIZE; ++k) totals[u] += to_float(loaded[u][k]);
    }
  }
  // What is left, one vector a thread, then one element a thread.
  for (int64_t i = tiles * TILE + first; i < vectors; i += stride) {
    const Vector loaded = x_vectors[i];
#pragma unroll
    for (int k = 0; k < Vector::SIZE; ++k) totals[k % UNROLL] += to_float(loaded[k]);
  }
  if (first < head) totals[0] += to_float(x[first]);
  if (tail + first < n) totals[1] += to_float(x[tail + first]);

  __shared__ float warp_sums[WARPS];
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const float of_warp = warp_sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
  if (lane_id == 0) warp_sums[warp_id] = of_warp;
  __syncthreads();  // for the sums of all warps
  if (warp_id == 0) {
    const float of_block = warp_sum(lane_id < WARPS ? warp_sums[lane_id] : 0.0f);
    if (lane_id == 0) sums[blockIdx.x] = of_block;
  }
}

void reduction_v02_grid_stride(const ReductionArgs& args) {
  const int64_t most_blocks = multiprocessor_count() * BLOCKS_PER_SM;
  if (args.workspace == nullptr) {
    *args.workspace_bytes = most_blocks * sizeof(float);
    return;
  }
  float* sums = static_cast<float*>(args.workspace);

  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t grid = std::clamp(cdiv(args.n, THREADS * Pack<T>::SIZE), int64_t{1}, most_blocks);
    reduction_v02_grid_stride_kernel<<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x),
                                                                        grid == 1 ? args.out : sums, args.n);
    CUDA_CHECK(cudaGetLastError());
    if (grid == 1) return;
    reduction_v02_grid_stride_kernel<<<1, THREADS, 0, args.stream>>>(sums, args.out, grid);
    CUDA_CHECK(cudaGetLastError());
  });
}
