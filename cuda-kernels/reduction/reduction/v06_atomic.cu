// reduction v06_atomic: blocks add their sums to the result themselves.
//
// Change:   instead of writing its sum for a second launch, a block adds it to out by an atomic, in L2.
// Why:      for a short vector a second launch is most of the time; a memset that zeroes out takes its place.
//           But blocks add in the order in which they end, and floating-point addition is not associative:
//           the last bits of the result change from run to run.
// Error:    14 roundings in a block as in v05, and one for each block that adds: to first order at most
//           (14 + blocks) eps/2 sum|x|, in practice far less. The atomic takes subnormal numbers for zero.
// Counter:  time stays at 2^26 elements; launches is 1 beside the memset.
// Requires: a contiguous tensor of any size and alignment; the few elements before the first and after the
//           last whole vector are added one by one.
// Twin:     triton-kernels/reduction/reduction/v06_atomic.py
#include <algorithm>

#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 4;         // independent loads a thread
constexpr int BLOCKS_PER_SM = 4;  // 1024 threads with 64 bytes each in flight: 64 KiB an SM

constexpr int WARPS = THREADS / 32;
constexpr int TILE = THREADS * UNROLL;  // vectors

static_assert(WARPS <= 32, "one warp sums the warps' sums");
static_assert((UNROLL & (UNROLL - 1)) == 0, "a tile's tree halves down to one number");

// Loaded in place of vectors beyond the end, by selecting the address: no load waits behind a branch.
__device__ const uint4 ZEROS = {0, 0, 0, 0};

// The sum of COUNT numbers as a tree: a number passes through log2(COUNT) additions.
template <int COUNT, typename T>
__device__ float tree_sum(const T* values) {
  if constexpr (COUNT == 1) {
    return to_float(values[0]);
  } else {
    return tree_sum<COUNT / 2>(values) + tree_sum<COUNT / 2>(values + COUNT / 2);
  }
}

// A running total (TwoSum), and the sum of its rounding errors.
struct Total {
  float sum = 0.0f;
  float error = 0.0f;

  __device__ void operator+=(float value) {
    const float next = sum + value;
    const float added = next - sum;  // what of value arrived; the rest of next came from sum
    error += (sum - (next - added)) + (value - added);
    sum = next;
  }
  // Without the error if that is NaN: once the sum is infinite or NaN, its error is meaningless.
  __device__ float value() const { return isfinite(error) ? sum + error : sum; }
};

// x: [n], out: one number, zero at the start
template <typename T>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    reduction_v06_atomic_kernel(const T* x, float* out, int64_t n) {
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
  Total total;

  // Whole rounds: every block takes a tile, UNROLL rows of THREADS vectors.
  int64_t begin = 0;
#pragma unroll 1  // or the compiler unrolls rounds, too, and more than UNROLL loads are in flight
  for (; begin + UNROLL * stride < vectors; begin += UNROLL * stride) {
    const int64_t tile = begin + static_cast<int64_t>(blockIdx.x) * TILE;
    Vector loaded[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) loaded[u] = x_vectors[tile + u * THREADS + threadIdx.x];
    total += tree_sum<UNROLL * Vector::SIZE>(reinterpret_cast<const T*>(loaded));
  }
  // The last, partial round is dealt out in rows as long as the grid, so that all blocks end together.
  Vector loaded[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    const int64_t i = begin + u * stride + first;
    const uint4* words = i < vectors ? &x_vectors[i].words : &ZEROS;
    loaded[u].words = *words;
  }
  total += tree_sum<UNROLL * Vector::SIZE>(reinterpret_cast<const T*>(loaded));
  // The elements before the first and behind the last whole vector, one a thread.
  if (first < head) total += to_float(x[first]);
  if (tail + first < n) total += to_float(x[tail + first]);

  __shared__ float warp_sums[WARPS];
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const float of_warp = warp_sum(total.value());
  if (lane_id == 0) warp_sums[warp_id] = of_warp;
  __syncthreads();  // waits for the sums of all warps
  if (warp_id == 0) {
    const float of_block = warp_sum(lane_id < WARPS ? warp_sums[lane_id] : 0.0f);
    if (lane_id == 0) atomicAdd(out, of_block);
  }
}

void reduction_v06_atomic(const ReductionArgs& args) {
  if (args.workspace == nullptr) {
    *args.workspace_bytes = 0;
    return;
  }
  CUDA_CHECK(cudaMemsetAsync(args.out, 0, sizeof(float), args.stream));

  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    // As n grows, launches grow in this order: blocks, until every SM has one; loads a thread, up to UNROLL;
    // blocks an SM; rounds.
    const int64_t sms = multiprocessor_count();
    const int64_t vectors = cdiv(args.n, Pack<T>::SIZE);
    const int64_t most_blocks = std::clamp(cdiv(vectors, TILE), sms, sms * BLOCKS_PER_SM);
    const int64_t grid = std::clamp(cdiv(vectors, THREADS), int64_t{1}, most_blocks);
    reduction_v06_atomic_kernel<<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), args.out,
                                                                   args.n);
    CUDA_CHECK(cudaGetLastError());
  });
}
