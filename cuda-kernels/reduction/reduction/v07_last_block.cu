// reduction v07_last_block: the block that ends last sums what all blocks have written.
//
// Change:   a block writes its sum to the workspace and takes a ticket from a counter. The block with the
//           last ticket knows that all sums are there and adds them, always in the same order: one launch,
//           and runs agree bit by bit. The last ticket also resets the counter to zero.
// Why:      one launch, and the same bits every time. The time of a short vector is launches and waiting, so
//           the way from the last load to the result is kept short: one thread sums the warps' sums, one
//           atomic is both fence and ticket, and from there a single warp works without barriers, with its
//           loads in flight together.
// Error:    at most 14 eps sum|x|, eps = 2^-23, for any n, as in v05: 15 roundings in a block, and then 3
//           in a lane's tree, 1 for each further row of loads (4 at most up to 320 SMs) and 5 in the warp, at
//           eps/2 each.
// Counter:  time at 2^26 elements stays v06's and at 2^16 falls below it; launches is 1.
// Requires: a contiguous tensor of any size and alignment; the few elements before the first and after the
//           last whole vector are added one by one. The counter is 0 at the start and again at the end.
// Twin:     triton-kernels/reduction/reduction/v07_last_block.py
#include <algorithm>

#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;
constexpr int FEW_LOADS = 4;      // independent loads a thread, if an SM then has at most one block
constexpr int MANY_LOADS = 8;     // in longer vectors
constexpr int BLOCKS_PER_SM = 4;  // 1024 threads with 128 bytes each in flight: 128 KiB an SM
constexpr int SUMS = 2;           // final loads a lane, each of four blocks' sums

constexpr int WARPS = THREADS / 32;

constexpr bool power_of_two(int number) { return (number & (number - 1)) == 0; }
static_assert(power_of_two(WARPS) && power_of_two(FEW_LOADS) && power_of_two(MANY_LOADS) &&
                  power_of_two(SUMS),
              "their trees halve down to one number");

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

// PTX ISA, "atom": counter = counter < last ? counter + 1 : 0; returns the old value. Release: this thread's
// earlier writes are visible to later tickets. Acquire: writes before earlier tickets are visible here.
__device__ inline unsigned take_ticket(unsigned* counter, unsigned last) {
  unsigned ticket;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(ticket)
               : "l"(counter), "r"(last)
               : "memory");
  return ticket;
}

// x: [n], sums: [blocks], counter and out: one number
template <typename T, int UNROLL>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    reduction_v07_last_block_kernel(const T* x, float* sums, unsigned* counter, float* out, int64_t n) {
  using Vector = Pack<T>;
  constexpr int TILE = THREADS * UNROLL;  // vectors
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

  __shared__ alignas(16) float warp_sums[WARPS];
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const float of_warp = warp_sum(total.value());
  if (lane_id == 0) warp_sums[warp_id] = of_warp;
  __syncthreads();  // waits for the sums of all warps
  if (warp_id != 0) return;

  const unsigned last = gridDim.x - 1;
  unsigned ticket = 0;
  if (lane_id == 0) {
    sums[blockIdx.x] = tree_sum<WARPS>(warp_sums);
    ticket = take_ticket(counter, last);
  }
  ticket = __shfl_sync(0xffffffff, ticket, 0);
  if (ticket != last) return;
  __syncwarp();  // extends what lane 0 has acquired to all lanes

  using Sums = Pack<float>;
  const Sums* blocks_sums = reinterpret_cast<const Sums*>(sums);
  const int size = gridDim.x / Sums::SIZE;  // exact: the grid is a multiple
  float of_lane = 0.0f;
#pragma unroll 1  // once for short vectors, three times for long ones on 132 SMs
  for (int row = 0; row < size; row += 32 * SUMS) {
    Sums loaded[SUMS];
#pragma unroll
    for (int u = 0; u < SUMS; ++u) {
      const int i = row + u * 32 + lane_id;
      const uint4* words = i < size ? &blocks_sums[i].words : &ZEROS;
      loaded[u].words = __ldcg(words);  // from L2: L1 may hold stale words
    }
    of_lane += tree_sum<SUMS * Sums::SIZE>(reinterpret_cast<const float*>(loaded));
  }
  const float of_grid = warp_sum(of_lane);
  if (lane_id == 0) *out = of_grid;
}

void reduction_v07_last_block(const ReductionArgs& args) {
  const int64_t sms = multiprocessor_count();
  const auto whole = [](int64_t blocks) { return cdiv(blocks, Pack<float>::SIZE) * Pack<float>::SIZE; };
  if (args.workspace == nullptr) {
    *args.workspace_bytes = whole(sms * BLOCKS_PER_SM) * sizeof(float);
    return;
  }

  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    // As n grows, launches grow in this order: blocks, until every SM has one; loads a thread, up to
    // FEW_LOADS, then MANY_LOADS; blocks an SM; rounds.
    const int64_t vectors = cdiv(args.n, Pack<T>::SIZE);
    const auto launch = [&](auto kernel, int loads) {
      const int64_t most_blocks = std::clamp(cdiv(vectors, THREADS * loads), sms, sms * BLOCKS_PER_SM);
      const int64_t grid = whole(std::clamp(cdiv(vectors, THREADS), int64_t{1}, most_blocks));
      kernel<<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x),
                                                static_cast<float*>(args.workspace),
                                                static_cast<unsigned*>(args.zeroed), args.out, args.n);
    };
    if (vectors <= sms * THREADS * FEW_LOADS) {
      launch(reduction_v07_last_block_kernel<T, FEW_LOADS>, FEW_LOADS);
    } else {
      launch(reduction_v07_last_block_kernel<T, MANY_LOADS>, MANY_LOADS);
    }
    CUDA_CHECK(cudaGetLastError());
  });
}
