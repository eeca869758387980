// reduction v08_polling: the first block polls for the other blocks' sums.
//
// Change:   a block stores its sum and a flag as one word of 8 bytes. Block 0 reads the words until all
//           have their flag, adds the sums up, always in the same order, and clears the words for the next
//           launch.
// Why:      v07 takes three round trips to L2: a store and its confirmation (the fence), a ticket, and the
//           load of the sums. A flag in the same word as the sum needs no fence: a reader that sees the flag
//           has the sum. One store and one load remain. That saves next to nothing at 2^26 elements, and
//           matters below 2^20.
// Error:    at most 14 eps sum|x|, eps = 2^-23, for any n, as in v07.
// Counter:  time at 2^26 elements stays v07's and at 2^16 falls below it.
// Requires: a contiguous tensor of any size and alignment; the few elements before the first and after the
//           last whole vector are added one by one. The words are 0 at the start and again at the end. Block
//           0 waits for all other blocks, and they wait for no block, so a GPU with room for two blocks makes
//           progress.
// Source:   flag and value in one word: Merrill and Garland, "Single-pass Parallel Prefix Scan with
//           Decoupled Look-back", 2016, section 4.4.
// Twin:     none, Triton does not guarantee progress to a program that waits for another one.
#include <algorithm>

#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;
constexpr int FEW_LOADS = 4;      // independent loads a thread, if an SM then has at most one block
constexpr int MANY_LOADS = 8;     // in longer vectors
constexpr int BLOCKS_PER_SM = 4;  // 1024 threads with 128 bytes each in flight: 128 KiB an SM
constexpr int PAIRS = 4;          // final loads a lane, each of two blocks' words

constexpr int WARPS = THREADS / 32;

constexpr bool power_of_two(int number) { return (number & (number - 1)) == 0; }
static_assert(power_of_two(WARPS) && power_of_two(FEW_LOADS) && power_of_two(MANY_LOADS) &&
                  power_of_two(PAIRS),
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

// A block's sum in the lower half of a word, its flag in the upper half: 0 until the sum is stored.
__device__ inline uint64_t flagged(float sum) { return uint64_t{1} << 32 | __float_as_uint(sum); }

// PTX ISA, "st". A single store that the whole GPU sees; not ordered with other accesses.
__device__ inline void store_relaxed(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// PTX ISA, "ld". Loads two words, each whole, from L2, where other blocks' stores are visible.
__device__ inline void load_relaxed(uint64_t (&pair)[2], const uint64_t* words) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(pair[0]), "=l"(pair[1])
               : "l"(words)
               : "memory");
}

// x: [n], words: [blocks], out: one number
template <typename T, int UNROLL>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    reduction_v08_polling_kernel(const T* x, uint64_t* words, float* out, int64_t n) {
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

  if (lane_id == 0) store_relaxed(&words[blockIdx.x], flagged(tree_sum<WARPS>(warp_sums)));
  if (blockIdx.x != 0) return;

  float of_lane = 0.0f;
#pragma unroll 1  // once for short vectors, three times for long ones on 132 SMs
  for (int row = 0; row < static_cast<int>(gridDim.x); row += 32 * PAIRS * 2) {
    uint64_t pairs[PAIRS][2];
    bool complete = false;
    while (!complete) {
      complete = true;
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        const int i = row + (p * 32 + lane_id) * 2;
        pairs[p][0] = pairs[p][1] = flagged(0.0f);
        if (i < static_cast<int>(gridDim.x)) load_relaxed(pairs[p], &words[i]);  // the grid is even
      }
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) complete &= (pairs[p][0] & pairs[p][1]) >> 32 != 0;
    }
    float of_pair[PAIRS];
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      const int i = row + (p * 32 + lane_id) * 2;
      if (i < static_cast<int>(gridDim.x)) words[i] = words[i + 1] = 0;
      of_pair[p] = __uint_as_float(static_cast<uint32_t>(pairs[p][0])) +
                   __uint_as_float(static_cast<uint32_t>(pairs[p][1]));
    }
    of_lane += tree_sum<PAIRS>(of_pair);
  }
  const float of_grid = warp_sum(of_lane);
  if (lane_id == 0) *out = of_grid;
}

void reduction_v08_polling(const ReductionArgs& args) {
  if (args.workspace == nullptr) {
    *args.workspace_bytes = 0;  // the words are in the zeroed memory
    return;
  }
  constexpr int64_t MOST_WORDS = ZEROED_BYTES / sizeof(uint64_t);
  const int64_t sms = multiprocessor_count();

  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    // As n grows, launches grow in this order: blocks, until every SM has one; loads a thread, up to
    // FEW_LOADS, then MANY_LOADS; blocks an SM; rounds.
    const int64_t vectors = cdiv(args.n, Pack<T>::SIZE);
    const auto launch = [&](auto kernel, int loads) {
      const int64_t most_blocks = std::clamp(cdiv(vectors, THREADS * loads), sms, sms * BLOCKS_PER_SM);
      const int64_t blocks =
          std::clamp(cdiv(vectors, THREADS), int64_t{1}, std::min(most_blocks, MOST_WORDS));
      const int64_t grid = cdiv(blocks, 2) * 2;  // as words are read in pairs
      kernel<<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x),
                                                static_cast<uint64_t*>(args.zeroed), args.out, args.n);
    };
    if (vectors <= sms * THREADS * FEW_LOADS) {
      launch(reduction_v08_polling_kernel<T, FEW_LOADS>, FEW_LOADS);
    } else {
      launch(reduction_v08_polling_kernel<T, MANY_LOADS>, MANY_LOADS);
    }
    CUDA_CHECK(cudaGetLastError());
  });
}
