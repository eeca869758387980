// reduction v04_vectorized: a thread loads four vectors of 16 bytes before it adds any.
//
// Change:   a block of 256 threads takes a tile of 1024 vectors, 4096 fp32 or 8192 bf16 elements, in place of
//           256 elements; a thread adds what it loaded in registers, and the block goes on as in v03.
// Why:      a memory latency is paid once for 64 bytes a thread instead of 4, and the shuffles and the
//           barrier, which cost the same a block, are shared by 16 or 32 times the elements.
// Counter:  time falls and dram_share rises; sectors_per_load is 16; launches falls to 3 for 2^26 elements.
// Requires: a contiguous tensor of any size and alignment; the few elements before the first and after the
//           last whole vector are added one by one.
// Twin:     triton-kernels/reduction/reduction/v04_vectorized.py
#include <algorithm>
#include <utility>

#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 4;         // independent loads a thread
constexpr int BLOCKS_PER_SM = 4;  // at least; unasked, the compiler saves registers by adding between loads

constexpr int WARPS = THREADS / 32;
constexpr int TILE = THREADS * UNROLL;  // vectors a block

static_assert(WARPS <= 32, "one warp sums the warps' sums");

// Loaded in place of vectors beyond the end, by selecting the address: no load waits behind a branch.
__device__ const uint4 ZEROS = {0, 0, 0, 0};

// x: [n], sums: [blocks]
template <typename T>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    reduction_v04_vectorized_kernel(const T* x, float* sums, int64_t n) {
  using Vector = Pack<T>;
  // x = head elements up to the first address that is a multiple of 16, whole vectors, tail elements
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
  const int64_t head = min(n, static_cast<int64_t>((Vector::SIZE - misaligned) % Vector::SIZE));
  const Vector* x_vectors = reinterpret_cast<const Vector*>(x + head);
  const int64_t vectors = (n - head) / Vector::SIZE;
  const int64_t tail = head + vectors * Vector::SIZE;

  // A tile is UNROLL rows of THREADS vectors. All loads stand before the first addition.
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * TILE;
  Vector loaded[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const int64_t i = tile + u * THREADS + threadIdx.x;
    const uint4* words = i < vectors ? &x_vectors[i].words : &ZEROS;
    loaded[u].words = *words;
  }
  float total = 0.0f;
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
    for (int k = 0; k < Vector::SIZE; ++k) total += to_float(loaded[u][k]);
  }
  // The elements before the first and behind the last whole vector, one a thread.
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (first < head) total += to_float(x[first]);
  if (tail + first < n) total += to_float(x[tail + first]);

  __shared__ float warp_sums[WARPS];
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const float of_warp = warp_sum(total);
  if (lane_id == 0) warp_sums[warp_id] = of_warp;
  __syncthreads();  // waits for the sums of all warps
  if (warp_id == 0) {
    const float of_block = warp_sum(lane_id < WARPS ? warp_sums[lane_id] : 0.0f);
    if (lane_id == 0) sums[blockIdx.x] = of_block;
  }
}

// Blocks that n elements take.
template <typename T>
static int64_t grid_for(int64_t n) {
  return std::max(cdiv(n, TILE * Pack<T>::SIZE), int64_t{1});
}

void reduction_v04_vectorized(const ReductionArgs& args) {
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    // A launch cannot overwrite its input, as its blocks run in any order: the sums of odd and of even
    // launches lie in two places, one behind the other.
    const int64_t blocks = grid_for<T>(args.n);
    if (args.workspace == nullptr) {
      *args.workspace_bytes = (blocks + grid_for<float>(blocks)) * sizeof(float);
      return;
    }
    float* sums = static_cast<float*>(args.workspace);
    float* next_sums = sums + blocks;

    reduction_v04_vectorized_kernel<<<blocks, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.x), blocks == 1 ? args.out : sums, args.n);
    CUDA_CHECK(cudaGetLastError());
    for (int64_t left = blocks; left > 1; left = grid_for<float>(left)) {
      const int64_t grid = grid_for<float>(left);
      reduction_v04_vectorized_kernel<<<grid, THREADS, 0, args.stream>>>(
          sums, grid == 1 ? args.out : next_sums, left);
      CUDA_CHECK(cudaGetLastError());
      std::swap(sums, next_sums);
    }
  });
}
