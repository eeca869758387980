// softmax v07_cluster: a split row, held by a cluster of blocks in distributed shared memory.
//
// Change:   each block of a cluster holds a part of the row in its shared memory and works on it chunk by
//           chunk, as the copies arrive. The blocks send each other their maximum and sum through distributed
//           shared memory. One block, or cluster, serves one row again, as in v05.
// Why:      a row of 256 K elements does not fit on one SM. Split over several it fits, is read once, and two
//           numbers a block are all that is exchanged. The hardware hands out blocks in the order of the
//           rows, which keeps reads and writes close together, where v06's persistent blocks drift apart.
// Counter:  at a row of 4096, which goes to v05's kernel, nothing changes; at a row of 65536 the time falls.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   up to 32 KiB: v05's kernel
//           up to 132 KiB: one block a row, in its shared memory alone
//           up to 16 x 208 KiB: a cluster of 2 to 16 blocks
//           longer, or if the GPU has no room for the cluster: v02's kernel
// Source:   CUDA C++ Programming Guide, "Distributed Shared Memory"; PTX ISA, "st.async"; quack's softmax.py
//           (clusters by row length)
// Twin:     none, Triton gives a program no access to another one's shared memory.
#include "args.h"
#include "lib/cluster.cuh"
#include "lib/ptx/hopper.cuh"
#include "online.cuh"

void softmax_v02_online(const SoftmaxArgs& args);
void softmax_v05_rows_per_block(const SoftmaxArgs& args);

namespace {

constexpr int PACKS = 4;                      // a thread, of each chunk
constexpr int MOST_CHUNKS = 8;                // of a part
constexpr int MOST_BLOCKS = 16;               // of a cluster
constexpr int64_t REGISTER_ROW = 32 * 1024;   // bytes up to which v05 is as fast
constexpr int64_t PART = 64 * 1024;           // wanted a block of a split row: three fit an SM
constexpr int64_t LARGEST_PART = 208 * 1024;  // possible: one fits an SM
constexpr int64_t SINGLE_ROW = 132 * 1024;    // up to which one block is faster than a cluster

// x: [M, N], rows stride_xm apart; out: [M, N]. Block `rank` of a cluster holds the rank-th part of a row.
template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS, 1536 / THREADS)
    softmax_v07_cluster_kernel(const T* __restrict__ x, T* __restrict__ out, int N, int64_t stride_xm,
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
  const int skew = skew_of(row_x);
  const int packs = (N + skew + SIZE - 1) / SIZE;
  const int each = (packs + blocks - 1) / blocks;
  const int begin = min(rank * each, packs);
  const int count = min(each, packs - begin);
  const auto first_of = [&](int pack) { return (begin + pack) * SIZE - skew; };
  Pack<T>* held = reinterpret_cast<Pack<T>*>(part);

  if (threadIdx.x == 0) {
    for (int chunk = 0; chunk * CHUNK < count; ++chunk) mbarrier_init(&arrived[chunk], 1);
    mbarrier_init(&exchanged, 1);
    fence_mbarrier_init();
    for (int chunk = 0; chunk * CHUNK < count; ++chunk) {
      // The copy engine brings the whole packs of the chunk.
      int head = chunk * CHUNK, tail = min(head + CHUNK, count);
      if (first_of(head) < 0) ++head;
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
    const int pack = end == 0 ? 0 : count - 1;
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
      if (pack >= count) {
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

  const bool aligned = skew_of(row_out) == skew;
  const auto write = [&](auto result) {
#pragma unroll 4
    for (int pack = threadIdx.x; pack < count; pack += THREADS) {
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

// Returns false, without a launch, if the GPU has no room for the cluster. The grid is never too large: that
// many long rows would take 4 TiB.
template <typename T, int THREADS>
bool launch(const SoftmaxArgs& args, int blocks) {
  const auto kernel = softmax_v07_cluster_kernel<T, THREADS>;
  if (most_shared_memory() < LARGEST_PART) return false;
  allow_shared_memory(kernel, LARGEST_PART);
  const int bytes = static_cast<int>(cdiv(most_packs<T>(args.N), blocks) * 16);
  ClusterLaunch clusters(reinterpret_cast<const void*>(kernel), blocks, THREADS, bytes, args.stream);
  if (clusters.resident() == 0) return false;
  clusters(static_cast<int>(args.M), kernel, static_cast<const T*>(args.x), static_cast<T*>(args.out),
           static_cast<int>(args.N), args.stride_xm, blocks, args.log);
  return true;
}

}  // namespace

void softmax_v07_cluster(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (bytes <= REGISTER_ROW) return softmax_v05_rows_per_block(args);
    if (bytes > MOST_BLOCKS * (LARGEST_PART - 16)) return softmax_v02_online(args);
    int blocks = 1;
    while (bytes > SINGLE_ROW && blocks < MOST_BLOCKS && blocks * PART < bytes) blocks *= 2;
    // A block that has the row, and the SM, to itself needs twice the threads.
    const bool alone = blocks == 1 && bytes > SINGLE_ROW - PART / 2;
    const bool launched = alone ? launch<T, 1024>(args, blocks) : launch<T, 512>(args, blocks);
    if (!launched) softmax_v02_online(args);
  });
}
