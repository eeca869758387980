// Rows in the registers of clusters that come and go: what softmax's v10, layer_norm's v08 and rms_norm's v05
// share, and of a warp's part the steps behind these.
#pragma once

#include "cluster.cuh"
#include "lib/ptx/hopper.cuh"
#include "packs.cuh"

// What a thread holds of a row: few packs, since small parts come and go more finely, fewer yet where lines
// start rows that two blocks hold, or as many as it has registers for, where a cluster would not hold the
// row otherwise.
constexpr int HELD_PACKS = 5, FEW_HELD_PACKS = 3, MOST_HELD_PACKS = 8;
constexpr int HELD_WARPS = 8;  // of a block at most, where a step says nothing else
constexpr int HELD_THREADS = 32 * HELD_WARPS, MOST_PARTS = MOST_CLUSTER_BLOCKS * HELD_WARPS;
constexpr int FEW_HELD_BYTES = 2 * HELD_THREADS * FEW_HELD_PACKS * 16;  // of a row
// Packs that a row of a warp may touch: with fewer, half of its lanes would be idle.
constexpr int64_t LEAST_WARP_PACKS = 17;

// Rounded two by two, which is one instruction where set() makes three.
__device__ inline void round_to(Pack<float>& pack, const float (&values)[4]) {
  pack.words = make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                          __float_as_uint(values[3]));
}
__device__ inline void round_to(Pack<__nv_bfloat16>& pack, const float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reinterpret_cast<__nv_bfloat162*>(&pack.words)[i] =
        __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  }
}
__device__ inline void round_to(Pack<__half>& pack, const float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reinterpret_cast<__half2*>(&pack.words)[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
  }
}

// A warp's part of a row of N elements, at least two packs of them: 32 * PACKS packs, which are counted from
// the line in which the row begins, `skew` elements before it. A thread has those that are the row's alone.
// What the row has of its first and its last pack otherwise, lanes take, an element each.
template <typename T, int PACKS>
struct HeldPart {
  static constexpr int SIZE = Pack<T>::SIZE, ELEMENTS = 32 * PACKS * SIZE, NONE = -1;
  int N, skew, own, lane_id;

  __device__ int first_of(int i) const { return own * ELEMENTS + (32 * i + lane_id) * SIZE - skew; }
  __device__ bool holds(int i) const {
    return static_cast<unsigned>(first_of(i)) <= static_cast<unsigned>(N - SIZE);
  }
  // This lane's column of those, if it has one.
  __device__ int single() const {
    const int head = (SIZE - skew % SIZE) % SIZE, tail = (N + skew) % SIZE;
    if (own == 0 && lane_id < head) return lane_id;
    const int end = lane_id - SIZE;
    if (own == (N + skew) / ELEMENTS && end >= 0 && end < tail) return N - tail + end;
    return NONE;
  }
  __device__ int start_of(int part) const { return min(max(part * ELEMENTS - skew, 0), N); }
  __device__ int elements_of(int part) const { return start_of(part + 1) - start_of(part); }
};

// Asks for this thread's packs of a row; `fill` stands where it has none. Every load has a predicate, where a
// branch between two would have the compiler wait, and all have one address, where columns would be an
// address each. L2 treats the lines like any others: where rows start anywhere, those that it would give up
// first are still a neighbour's.
template <typename T, int PACKS>
__device__ void load_held(Pack<T> (&packs)[PACKS], const T* row, const HeldPart<T, PACKS>& part, float fill) {
  const T* const first = row + part.first_of(0);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) set(packs[i], j, from_float<T>(fill));
    uint4& words = packs[i].words;
    asm volatile(
        "{\n"
        ".reg .pred holds;\n"
        "setp.ne.b32 holds, %5, 0;\n"
        "@holds ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
        : "l"(first + 32 * i * Pack<T>::SIZE), "r"(static_cast<int>(part.holds(i))));
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// What warps of a cluster tell each other, once, to all blocks: 8 bytes about each of one or two rows.
template <typename Numbers, int ROWS = 1>
struct WarpExchange {
  static constexpr int BYTES = sizeof(Numbers);
  uint64_t complete;                                 // a phase completes with the numbers of several blocks
  alignas(8) char numbers[ROWS][MOST_PARTS][BYTES];  // bytes, since nothing initialises shared memory

  // All threads of all blocks call it, once a block has asked for its rows. The arrival orders nothing but
  // the barrier's initialisation: a release would have every warp wait here for what it has asked for, and
  // then for L2.
  __device__ void begin(int parts) {
    if (threadIdx.x == 0) {
      mbarrier_init(&complete, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect_tx(&complete, ROWS * parts * BYTES);
    }
    cluster_arrive_relaxed();
  }

  // For all blocks to run, with their barriers initialised.
  __device__ void meet() { cluster_wait(); }

  // Once all have met. Sends this warp's numbers, of which all lanes have the same, and waits for all
  // others'. No block ends before it has them, and so none before all have sent it theirs.
  __device__ void swap(const Numbers (&mine)[ROWS], int own, int blocks) {
    static_assert(ROWS * MOST_CLUSTER_BLOCKS <= 32);
    const int row = threadIdx.x % 32 / MOST_CLUSTER_BLOCKS, block = threadIdx.x % MOST_CLUSTER_BLOCKS;
    const Numbers its = row == 0 ? mine[0] : mine[ROWS - 1];
    const bool sends = row < ROWS && block < blocks;
    Numbers* const place = reinterpret_cast<Numbers*>(numbers[sends ? row : 0][own]);
    if (blocks == 1) {  // memcheck takes a store to the cluster for a wrong one where that is a single block
      if (sends) *place = its;
      __syncthreads();  // for all warps' numbers
    } else {
      if (sends) store_async(place, its, &complete, block);
      mbarrier_wait_parity_shared(&complete, 0);
    }
  }

  __device__ void operator()(const Numbers (&mine)[ROWS], int own, int blocks) {
    meet();
    swap(mine, own, blocks);
  }

  __device__ Numbers at(int part, int row = 0) const {
    Numbers its;
    memcpy(&its, numbers[row][part], BYTES);
    return its;
  }
};

#endif  // __CUDA_ARCH__ >= 900

// Blocks of a cluster and their threads, for a row of so many packs, of which a thread has `each`; no blocks
// where it is too long. Four warps are a block, one for each of an SM's schedulers, whose registers blocks of
// five or seven leave part of unused; more where a cluster has not enough such blocks for the row, or where
// threads have few packs and one or two blocks are enough, which start faster than three or four. Blocks of
// more than four warps have up to `most_warps`.
struct HeldShape {
  int blocks = 0, threads = 0;

  HeldShape(int64_t packs, int each, int most_warps = HELD_WARPS) {
    const int64_t parts = cdiv(packs, 32 * each);
    if (parts > MOST_PARTS) return;
    const int warps = each > FEW_HELD_PACKS && parts <= 4 * MOST_CLUSTER_BLOCKS ? 4 : most_warps;
    blocks = static_cast<int>(cdiv(parts, warps));
    threads = 32 * static_cast<int>(cdiv(parts, blocks));
  }
};

// Whether two matrices' rows all lie alike within their 16 bytes.
template <typename T>
bool skewed_alike(const void* x, int64_t stride_x, const void* out, int64_t stride_out) {
  const auto skew = [](const void* rows) { return reinterpret_cast<uintptr_t>(rows) % 16; };
  return skew(x) == skew(out) && (stride_x - stride_out) % Pack<T>::SIZE == 0;
}

// Launches kernel(arguments...) with `clusters` clusters of that shape. Whether there is room for one.
template <typename Kernel, typename... Arguments>
bool launch_by_rows(int64_t clusters, HeldShape shape, int shared_bytes, cudaStream_t stream, Kernel* kernel,
                    Arguments... arguments) {
  if (shape.blocks == 0 || clusters > INT32_MAX) return false;
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), shape.blocks, shape.threads, shared_bytes,
                       stream);
  if (launch.resident() == 0) return false;
  launch.by_rows(static_cast<int>(clusters), kernel, arguments...);
  return true;
}
