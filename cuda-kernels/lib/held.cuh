// Register-resident rows, split over the warps of a cluster, or in one warp: used by softmax's v10, v13 and
// by the norms from layer_norm's v08 and rms_norm's v05 on. Terms: docs/glossary.md.
#pragma once

#include "cluster.cuh"
#include "lib/ptx/hopper.cuh"
#include "packs.cuh"

// Packs a thread holds of a split row.
// - HELD_PACKS: the usual number. A small part frees its warp's registers early for the next row.
// - FEW_HELD_PACKS: for aligned rows that two blocks hold, where an even smaller part is faster.
// - MOST_HELD_PACKS: as many as the registers allow, for rows that no cluster holds otherwise.
constexpr int HELD_PACKS = 5, FEW_HELD_PACKS = 3, MOST_HELD_PACKS = 8;
constexpr int HELD_WARPS = 8;  // most warps a block, unless a step sets its own limit
constexpr int HELD_THREADS = 32 * HELD_WARPS, MOST_HELD_PARTS = MOST_CLUSTER_BLOCKS * HELD_WARPS;
constexpr int FEW_HELD_BYTES = 2 * HELD_THREADS * FEW_HELD_PACKS * 16;  // longest row with FEW_HELD_PACKS

// Whether the rows of the inputs have the skew of out's rows within 16 bytes.
enum class Skews { ALIKE, DIFFER };

// Converts a pack's values with one instruction for two elements; set() on each would take three.
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

// A warp's part of a split row of N elements: 32 * PACKS packs, counted from the line in which the row
// begins, `skew` elements before it. The row has at least three packs. A thread holds whole packs only. The
// elements of the first and the last pack, if these are ragged, go to single lanes, one element each.
//
// If an input's skew within 16 bytes differs, packs are laid out on out's lines, and a pack of the input is
// shifted together from two aligned words (load_shifted). `reach` is how many elements the second word lies
// behind the pack. A pack whose word would reach behind the row is not held: its elements are single, too.
template <typename T, int PACKS>
struct HeldPart {
  static constexpr int SIZE = Pack<T>::SIZE, ELEMENTS = 32 * PACKS * SIZE, NONE = -1;
  int N, skew, own, lane_id;
  int reach = 0;

  __device__ int first_of(int i) const { return own * ELEMENTS + (32 * i + lane_id) * SIZE - skew; }
  __device__ bool holds(int i) const {
    return static_cast<unsigned>(first_of(i)) <= static_cast<unsigned>(N - SIZE - reach);
  }
  // The column of this lane's single element, or NONE. Lanes from 0 on take the head, in the warp with the
  // first part; lanes from SIZE on take the tail, in the warp with the last.
  __device__ int single() const {
    const int head = (SIZE - skew % SIZE) % SIZE, tail = (N + skew - reach) % SIZE + reach;
    if (own == 0 && lane_id < head) return lane_id;
    const int end = lane_id - SIZE;
    if (own == last_part() && end >= 0 && end < tail) return N - tail + end;
    return NONE;
  }
  // The part with the row's last element, which is a single one unless the last pack is held.
  __device__ int last_part() const { return (N + skew - reach) / ELEMENTS; }
  __device__ int start_of(int part) const {
    if (reach > 0 && part > last_part()) return N;  // its tail may be longer than what is left of the part
    return min(max(part * ELEMENTS - skew, 0), N);
  }
  __device__ int elements_of(int part) const { return start_of(part + 1) - start_of(part); }
};

// Issues the loads of this thread's whole packs; `fill` stands where it has none. Each load has a predicate
// instead of a branch, because the compiler waits for loads before a branch. All are offsets from one
// address, to save registers.
//
// No evict-first hint: a misaligned row shares its first and last line with its neighbours, which still need
// them.
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

// Loads packs of an input whose skew within 16 bytes differs from out's: pack i begins STEP * i elements
// behind `first`, and `shift` elements behind a multiple of 16 bytes. Two aligned words hold it, of which the
// second is mostly in L1 when it is asked for, as it is the next lane's first. `fill` stands where holds(i)
// is false.
template <int STEP, typename T, int PACKS, typename Holds>
__device__ void load_shifted(Pack<T> (&packs)[PACKS], const T* first, int shift, float fill, Holds holds) {
  const T* const words = first - shift;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    Pack<T> none;
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) set(none, j, from_float<T>(fill));
    uint4 low = none.words, high = none.words;
    const bool held = holds(i);
    asm volatile(
        "{\n"
        ".reg .pred holds, spans;\n"
        "setp.ne.b32 holds, %9, 0;\n"
        "setp.ne.b32 spans, %10, 0;\n"
        "@holds ld.global.v4.b32 {%0, %1, %2, %3}, [%8];\n"
        "@spans ld.global.v4.b32 {%4, %5, %6, %7}, [%8 + 16];\n"
        "}"
        : "+r"(low.x), "+r"(low.y), "+r"(low.z), "+r"(low.w), "+r"(high.x), "+r"(high.y), "+r"(high.z),
          "+r"(high.w)
        : "l"(words + STEP * i), "r"(static_cast<int>(held)), "r"(static_cast<int>(held && shift != 0)));
    packs[i] = put_together<T>(low, high, shift);
  }
}

// Bytes of shared memory that a WarpExchange takes. Host code asks for it also where there are no clusters.
template <typename Numbers, int ROWS = 1>
constexpr int EXCHANGE_BYTES = 8 + ROWS * MOST_HELD_PARTS * static_cast<int>(sizeof(Numbers));

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// The exchange of a split row's statistics: every warp of the cluster sends its numbers, for each of one or
// two rows, to all blocks once.
template <typename Numbers, int ROWS = 1>
struct WarpExchange {
  static constexpr int BYTES = sizeof(Numbers);
  uint64_t complete;  // a phase completes with the numbers of several blocks
  alignas(8) char numbers[ROWS][MOST_HELD_PARTS][BYTES];  // raw bytes: __shared__ runs no constructors

  // First step: initialises the mbarrier and arrives at the cluster's barrier. All threads of all blocks call
  // it, after they have issued their loads. The arrival is relaxed, since only the mbarrier's initialisation
  // must be visible, and its fence sees to that; a release would make every warp wait for its loads here.
  __device__ void begin(int parts) {
    if (threadIdx.x == 0) {
      mbarrier_init(&complete, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect_tx(&complete, ROWS * parts * BYTES);
    }
    cluster_arrive_relaxed();
  }

  // Second step: waits until all blocks run and have initialised their mbarriers.
  __device__ void meet() { cluster_wait(); }

  // Third step: sends this warp's numbers, the same in all of its lanes, and waits for those of all warps. No
  // block can end while another still sends to it, since each waits for all numbers.
  __device__ void swap(const Numbers (&mine)[ROWS], int own, int blocks) {
    static_assert(ROWS * MOST_CLUSTER_BLOCKS <= 32);
    const int row = threadIdx.x % 32 / MOST_CLUSTER_BLOCKS, block = threadIdx.x % MOST_CLUSTER_BLOCKS;
    const Numbers its = row == 0 ? mine[0] : mine[ROWS - 1];
    const bool sends = row < ROWS && block < blocks;
    Numbers* const place = reinterpret_cast<Numbers*>(numbers[sends ? row : 0][own]);
    if (blocks == 1) {  // plain stores: memcheck reports st.async in a cluster of one block
      if (sends) *place = its;
      __syncthreads();  // waits for the numbers of all warps
    } else {
      if (sends) store_async(place, its, &complete, block);
      mbarrier_wait_parity_shared(&complete, 0);  // waits for the numbers of all warps
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

// Launch shape for a row of `packs` packs, `each` of them a thread: blocks of the cluster and threads a
// block. No blocks if the row is too long.
//
// Blocks of four warps are preferred, one for each of an SM's schedulers: the register file is divided among
// the four, so five or seven warps leave registers unused. Blocks have up to `most_warps` warps instead if 16
// blocks of four warps do not hold the row, or if threads hold few packs: then one or two blocks suffice,
// which start sooner than three or four.
struct HeldShape {
  int blocks = 0, threads = 0;

  HeldShape(int64_t packs, int each, int most_warps = HELD_WARPS) {
    const int64_t parts = cdiv(packs, 32 * each);
    if (parts > MOST_HELD_PARTS) return;
    const int warps = each > FEW_HELD_PACKS && parts <= 4 * MOST_CLUSTER_BLOCKS ? 4 : most_warps;
    blocks = static_cast<int>(cdiv(parts, warps));
    threads = 32 * static_cast<int>(cdiv(parts, blocks));
  }
};

// How many elements the second word of an input's packs reaches behind them, if they begin `shift` elements
// behind a multiple of 16 bytes.
template <typename T>
__device__ int reach_of(int shift) {
  return shift == 0 ? 0 : Pack<T>::SIZE - shift;
}

// Loads a part of a row, as load_held where SKEWS are ALIKE. Where they DIFFER, packs are laid out on the
// lines of out's row, and the part learns how far their words reach.
template <Skews SKEWS, typename T, int PACKS>
__device__ void load_part(Pack<T> (&packs)[PACKS], const T* row, HeldPart<T, PACKS>& part, float fill) {
  if constexpr (SKEWS == Skews::ALIKE) {
    load_held(packs, row, part, fill);
  } else {
    const T* const first = row + part.first_of(0);
    const int shift = skew_of(first);
    part.reach = reach_of<T>(shift);
    load_shifted<32 * Pack<T>::SIZE>(packs, first, shift, fill, [&](int i) { return part.holds(i); });
  }
}

// True if row r of x and row r of out have the same skew within 16 bytes, for every r.
template <typename T>
bool skewed_alike(const void* x, int64_t stride_x, const void* out, int64_t stride_out) {
  const auto skew = [](const void* rows) { return reinterpret_cast<uintptr_t>(rows) % 16; };
  return skew(x) == skew(out) && (stride_x - stride_out) % Pack<T>::SIZE == 0;
}

// Launches kernel(arguments...) with `clusters` clusters of that shape. Returns false, without a launch, if
// the shape has no blocks, the grid would be too large, or the GPU has no room for one cluster.
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
