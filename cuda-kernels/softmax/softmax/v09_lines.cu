// softmax v09_lines: packs are counted from a line, a multiple of 128 bytes.
//
// Change:   the packs of a misaligned row are counted from the start of its first line, so up to seven of
//           them lie before the row; a block's part begins with a line. A warp's 32 packs are then exactly
//           four lines. The kernels are otherwise v05's and v07's. Ragged packs of register-resident rows
//           come by 16-byte loads, too, and are masked.
// Why:      counted from a multiple of 16 bytes, a warp's 32 packs touch five lines, and share the first and
//           the last with another warp: L2 looks up five lines instead of four, and sectors at the seams are
//           written in two pieces. Trials of the kernel ran before the predictions.
// Counter:  at a row of 4096, which is aligned, nothing changes; at a misaligned row of 50257 the time falls.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   up to 128 packs: v05's kernel, as up to seven idle lanes are too many for a short row
//           up to 32 KiB: a block's registers
//           up to 132 KiB: one block's shared memory
//           up to 16 x 208 KiB, less a line a block: a cluster of 2 to 16 blocks
//           longer, or if the GPU has no room for the cluster: v02's kernel
// Source:   NVIDIA, "CUDA C++ Best Practices Guide", "Effects of Misaligned Accesses"
// Twin:     none, see the spec
#include "args.h"
#include "lib/cluster.cuh"
#include "lib/ptx/hopper.cuh"
#include "online.cuh"

void softmax_v02_online(const SoftmaxArgs& args);
void softmax_v05_rows_per_block(const SoftmaxArgs& args);

namespace {

constexpr int HELD_PACKS = 5, HELD_THREADS = 448;  // of a register-resident row: packs a thread, most threads
constexpr int64_t WARP_PACKS = 128;                // up to which v05 gives a row one warp or less
constexpr int PACKS = 4;                           // a thread, of each chunk
constexpr int MOST_CHUNKS = 8;                     // of a part
constexpr int MOST_BLOCKS = 16;                    // of a cluster
constexpr int64_t REGISTER_ROW = 32 * 1024;        // bytes up to which registers hold a row
constexpr int64_t PART = 64 * 1024;                // wanted a block of a split row: three fit an SM
constexpr int64_t LARGEST_PART = 208 * 1024;       // possible: one fits an SM
constexpr int64_t SINGLE_ROW = 132 * 1024;         // up to which one block is faster than a cluster
static_assert(HELD_THREADS * HELD_PACKS >= REGISTER_ROW / 16 + LINE_PACKS, "a skewed row needs a line more");

// x: [M, N], rows stride_xm apart; out: [M, N]. Each block holds a row in registers, of at most blockDim.x *
// HELD_PACKS packs.
template <typename T>
__global__ void __launch_bounds__(HELD_THREADS)
    softmax_v09_lines_kernel(const T* __restrict__ x, T* __restrict__ out, int N, int64_t stride_xm,
                             bool log) {
  constexpr int SIZE = Pack<T>::SIZE;
  __shared__ MaxSum warps[32];
  const T* row_x = x + blockIdx.x * stride_xm;
  T* row_out = out + static_cast<int64_t>(blockIdx.x) * N;
  const int skew = skew_of<LINE_BYTES>(row_x);
  const auto first_of = [&](int i) { return static_cast<int>(i * blockDim.x + threadIdx.x) * SIZE - skew; };

  Pack<T> held[HELD_PACKS];
  load_touching_packs(held, row_x, N, first_of);
  MaxSum mine;
#pragma unroll
  for (int i = 0; i < HELD_PACKS; ++i) {
    mask_beside(held[i], first_of(i), N, -INFINITY);
    mine.max = fmaxf(mine.max, max_of(held[i]));
  }
#pragma unroll
  for (int i = 0; i < HELD_PACKS; ++i) {
    keep_packed(held[i]);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) mine.sum += exp_of(to_float(held[i][j]) - origin(mine.max));
  }
  const MaxSum whole = block_merge(mine, warps);

  const bool aligned = skew_of(row_out) == skew_of(row_x);
  const auto write = [&](auto result) {
#pragma unroll
    for (int i = 0; i < HELD_PACKS; ++i) {
      keep_packed(held[i]);
      Pack<T> values;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) set(values, j, from_float<T>(result(to_float(held[i][j]))));
      store_pack(row_out, first_of(i), N, aligned, values);
    }
  };
  if (log) {
    write(LogSoftmax(whole));
  } else {
    write(Softmax(whole));
  }
}

// Block `rank` of a cluster holds the rank-th part of a row in shared memory; parts are whole lines.
template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS, 1536 / THREADS)
    softmax_v09_lines_cluster_kernel(const T* __restrict__ x, T* __restrict__ out, int N, int64_t stride_xm,
                                     int blocks, bool log) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, CHUNK = THREADS * PACKS;
  extern __shared__ __align__(128) char part[];  // this block's packs of the row
  __shared__ uint64_t arrived[MOST_CHUNKS];      // a phase completes when the chunk has arrived
  __shared__ uint64_t exchanged;                 // and when the pairs of all blocks have
  __shared__ MaxSum warps[32], others[MOST_BLOCKS];

  const int rank = blocks > 1 ? static_cast<int>(cluster_block()) : 0;
  const int64_t row = blockIdx.x / blocks;
  const T* row_x = x + row * stride_xm;
  T* row_out = out + row * N;
  const int skew = skew_of<LINE_BYTES>(row_x);
  const int packs = (N + skew + SIZE - 1) / SIZE;
  const int each = ((packs + blocks - 1) / blocks + LINE_PACKS - 1) / LINE_PACKS * LINE_PACKS;
  const int begin = min(rank * each, packs);
  const int count = min(each, packs - begin);
  // The first block has packs before the row: `touching` is its first pack with an element of the row, `own`
  // its first whole pack.
  const int touching = rank == 0 ? skew / SIZE : 0, own = rank == 0 ? (skew + SIZE - 1) / SIZE : 0;
  const auto first_of = [&](int pack) { return (begin + pack) * SIZE - skew; };
  Pack<T>* held = reinterpret_cast<Pack<T>*>(part);

  if (threadIdx.x == 0) {
    for (int chunk = 0; chunk * CHUNK < count; ++chunk) mbarrier_init(&arrived[chunk], 1);
    mbarrier_init(&exchanged, 1);
    fence_mbarrier_init();
    for (int chunk = 0; chunk * CHUNK < count; ++chunk) {
      // The copy engine brings the whole packs of the chunk.
      const int head = max(chunk * CHUNK, own);
      int tail = min((chunk + 1) * CHUNK, count);
      if (first_of(tail) > N) --tail;
      const int bytes = max(0, tail - head) * 16;
      mbarrier_arrive_expect_tx(&arrived[chunk], bytes);
      if (bytes > 0) bulk_load(held + head, row_x + first_of(head), bytes, &arrived[chunk]);
    }
    if (blocks > 1) mbarrier_arrive_expect_tx(&exchanged, blocks * sizeof(MaxSum));
  }
  __syncthreads();  // waits for the mbarriers to be initialised
  if (blocks > 1) cluster_arrive();

  // Meanwhile the ragged packs at the row's ends; elements beside the row count as minus infinity. Each
  // thread always reads the same packs, so what it loads itself needs no barrier.
#pragma unroll
  for (int end = 0; end < 2; ++end) {
    const int pack = end == 0 ? touching : count - 1;
    if (count == 0 || pack % THREADS != threadIdx.x || is_whole<T>(first_of(pack), N)) continue;
    held[pack] = load_ragged(row_x, first_of(pack), N, -INFINITY);
  }

  Pack<T> nothing;
#pragma unroll
  for (int j = 0; j < SIZE; ++j) set(nothing, j, from_float<T>(-INFINITY));
  MaxSum mine;
  for (int chunk = 0; chunk * CHUNK < count; ++chunk) {
    mbarrier_wait_parity(&arrived[chunk], 0);  // waits for the copy of this chunk
    Pack<T> values[PACKS];
    float max = mine.max;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int pack = chunk * CHUNK + i * THREADS + static_cast<int>(threadIdx.x);
      if (pack < touching || pack >= count) {
        values[i] = nothing;
        continue;
      }
      values[i] = held[pack];
      max = fmaxf(max, max_of(values[i]));
    }
    mine = {max, rescaled(mine, max)};
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(values[i]);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) mine.sum += exp_of(to_float(values[i][j]) - origin(max));
    }
  }
  MaxSum whole = block_merge(mine, warps);

  if (blocks > 1) {
    cluster_wait();  // waits until all blocks run and have initialised their mbarriers
    if (threadIdx.x < blocks) store_async(&others[rank], whole, &exchanged, threadIdx.x);
    mbarrier_wait_parity_cluster(&exchanged, 0);  // waits for all pairs, so no block ends too early
    const int lane_id = threadIdx.x % 32;
    whole = lanes_merge(lane_id < blocks ? others[lane_id] : MaxSum{});
  }

  const bool aligned = skew_of(row_out) == skew_of(row_x);
  const auto write = [&](auto result) {
#pragma unroll 4
    for (int pack = threadIdx.x; pack < count; pack += THREADS) {
      if (pack < touching) continue;
      Pack<T> values = held[pack];
#pragma unroll
      for (int j = 0; j < SIZE; ++j) set(values, j, from_float<T>(result(to_float(values[j]))));
      store_pack(row_out, first_of(pack), N, aligned, values);
    }
  };
  if (log) {
    write(LogSoftmax(whole));
  } else {
    write(Softmax(whole));
  }
#endif
}

template <typename T>
void launch_block(const SoftmaxArgs& args, int64_t packs) {
  const int64_t threads = cdiv(cdiv(packs, HELD_PACKS), 32) * 32;
  softmax_v09_lines_kernel<T>
      <<<args.M, threads, 0, args.stream>>>(static_cast<const T*>(args.x), static_cast<T*>(args.out),
                                            static_cast<int>(args.N), args.stride_xm, args.log);
  CUDA_CHECK(cudaGetLastError());
}

// Returns false, without a launch, if the GPU has no room for the cluster; rows have at most `packs` packs.
// The grid is never too large: that many long rows would take 4 TiB.
template <typename T, int THREADS>
bool launch(const SoftmaxArgs& args, int blocks, int64_t packs) {
  const auto kernel = softmax_v09_lines_cluster_kernel<T, THREADS>;
  if (most_shared_memory() < LARGEST_PART) return false;
  allow_shared_memory(kernel, LARGEST_PART);
  const int bytes = static_cast<int>(cdiv(packs, blocks * LINE_PACKS)) * LINE_BYTES;
  ClusterLaunch clusters(reinterpret_cast<const void*>(kernel), blocks, THREADS, bytes, args.stream);
  if (clusters.resident() == 0) return false;
  clusters(static_cast<int>(args.M), kernel, static_cast<const T*>(args.x), static_cast<T*>(args.out),
           static_cast<int>(args.N), args.stride_xm, blocks, args.log);
  return true;
}

}  // namespace

void softmax_v09_lines(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (most_packs<T>(args.x, args.N, args.stride_xm) <= WARP_PACKS) return softmax_v05_rows_per_block(args);
    const int64_t packs = most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm);
    if (bytes <= REGISTER_ROW) return launch_block<T>(args, packs);
    if (bytes > MOST_BLOCKS * (LARGEST_PART - LINE_BYTES)) return softmax_v02_online(args);
    int blocks = 1;
    while (bytes > SINGLE_ROW && blocks < MOST_BLOCKS && blocks * PART < bytes) blocks *= 2;
    // A block that has the row, and the SM, to itself needs twice the threads.
    const bool alone = blocks == 1 && bytes > SINGLE_ROW - PART / 2;
    const bool launched = alone ? launch<T, 1024>(args, blocks, packs) : launch<T, 512>(args, blocks, packs);
    if (!launched) softmax_v02_online(args);
  });
}
