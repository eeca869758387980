// softmax_backward v04_cluster: several SMs share a row.
//
// Change:   what softmax's v07 does: a cluster of blocks holds a row of dout and y in its shared memory, each
//           block a part, sums it chunk by chunk as it arrives, and sends its sum to the others. Rows of up
//           to 32 KiB keep v03's kernel, and those of up to 104 KiB get one block.
// Why:      two rows of 256 K elements are 1 MiB: eight SMs hold that in shared memory, one does not. Every
//           element is read once, and one number a block is exchanged. Rows of up to 32 KiB keep v03's
//           kernel.
// Counter:  at a row of 4096 nothing.
// Requires: compute capability 9.0; contiguous rows. Those beyond a cluster's shared memory are v01's, and
//           those of a cluster for which the GPU has no room.
// Source:   CUDA C++ Programming Guide, "Distributed Shared Memory"; PTX ISA, "st.async"
// Twin:     none, Triton gives a program no access to another one's shared memory.
#include "args.h"
#include "gradient.cuh"
#include "lib/cluster.cuh"
#include "lib/ptx/hopper.cuh"

void softmax_backward_v01_two_passes(const SoftmaxBackwardArgs& args);
void softmax_backward_v03_rows_per_block(const SoftmaxBackwardArgs& args);

namespace {

constexpr int THREADS = 512;
constexpr int PACKS = 2;  // of each row, a thread and chunk
constexpr int CHUNK = THREADS * PACKS;
constexpr int MOST_CHUNKS = 8;                // a block
constexpr int MOST_BLOCKS = 16;               // a cluster
constexpr int64_t REGISTER_ROW = 32 * 1024;   // bytes of dout's row, up to which v03 is as fast
constexpr int64_t PART = 64 * 1024;           // of it, so that one block fills an SM
constexpr int64_t LARGEST_PART = 104 * 1024;  // that fits
constexpr int64_t SINGLE_ROW = 104 * 1024;    // up to which a block is better off alone
static_assert(LARGEST_PART / 16 <= MOST_CHUNKS * CHUNK);

// dout, y: [M, N], rows stride_dm and stride_ym apart; out: [M, N]. Block `rank` of a cluster takes the
// rank-th part of a row, in at most part_packs packs.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    softmax_backward_v04_cluster_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                        T* __restrict__ out, int N, int64_t stride_dm, int64_t stride_ym,
                                        int blocks, int part_packs, bool log) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE;
  extern __shared__ __align__(128) char part[];  // this block's packs of dout, then those of y
  __shared__ uint64_t arrived[MOST_CHUNKS];      // a phase completes when both rows' chunk is there
  __shared__ uint64_t exchanged;                 // and when all blocks' sums are
  __shared__ float warps[32], others[MOST_BLOCKS];

  const int rank = blocks > 1 ? static_cast<int>(cluster_block()) : 0;
  const int64_t row = blockIdx.x / blocks;
  const T* row_dout = dout + row * stride_dm;
  const T* row_y = y + row * stride_ym;
  T* row_out = out + row * N;
  const int skew = skew_of(row_y);
  const bool dout_aligned = skew_of(row_dout) == skew;
  const int packs = (N + skew + SIZE - 1) / SIZE;
  const int each = (packs + blocks - 1) / blocks;
  const int begin = min(rank * each, packs);
  const int count = min(each, packs - begin);
  const auto first_of = [&](int pack) { return (begin + pack) * SIZE - skew; };
  Pack<T>* held_dout = reinterpret_cast<Pack<T>*>(part);
  Pack<T>* held_y = held_dout + part_packs;

  if (threadIdx.x == 0) {
    for (int chunk = 0; chunk * CHUNK < count; ++chunk) mbarrier_init(&arrived[chunk], 1);
    mbarrier_init(&exchanged, 1);
    fence_mbarrier_init();
    for (int chunk = 0; chunk * CHUNK < count; ++chunk) {
      // Of the chunk's packs the copy engine takes those that are the row's alone.
      int head = chunk * CHUNK, tail = min(head + CHUNK, count);
      if (first_of(head) < 0) ++head;
      if (first_of(tail) > N) --tail;
      const int bytes = max(0, tail - head) * 16;
      mbarrier_arrive_expect_tx(&arrived[chunk], dout_aligned ? 2 * bytes : bytes);
      if (bytes == 0) continue;
      bulk_load(held_y + head, row_y + first_of(head), bytes, &arrived[chunk]);
      if (dout_aligned) bulk_load(held_dout + head, row_dout + first_of(head), bytes, &arrived[chunk]);
    }
    if (blocks > 1) mbarrier_arrive_expect_tx(&exchanged, blocks * sizeof(float));
  }
  __syncthreads();  // for the barriers to be initialised
  if (blocks > 1) cluster_arrive();

  // What the copy engine leaves, while it is at work. A thread reads the same packs whenever it reads, so
  // what it adds for itself needs no barrier.
#pragma unroll
  for (int end = 0; end < 2; ++end) {
    const int pack = end == 0 ? 0 : count - 1;
    if (count == 0 || pack % THREADS != threadIdx.x || is_whole<T>(first_of(pack), N)) continue;
    held_dout[pack] = load_ragged(row_dout, first_of(pack), N, 0.0f);
    held_y[pack] = load_ragged(row_y, first_of(pack), N, 0.0f);
  }
  for (int pack = threadIdx.x; !dout_aligned && pack < count; pack += THREADS) {
    held_dout[pack] = load_ragged(row_dout, first_of(pack), N, 0.0f);
  }

  float mine = 0.0f;
  for (int chunk = 0; chunk * CHUNK < count; ++chunk) {
    mbarrier_wait_parity(&arrived[chunk], 0);  // for the copies of this chunk
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int pack = chunk * CHUNK + i * THREADS + static_cast<int>(threadIdx.x);
      if (pack >= count) break;
      const Pack<T> douts = held_dout[pack], ys = held_y[pack];
#pragma unroll
      for (int j = 0; j < SIZE; ++j) mine += term_of(to_float(douts[j]), to_float(ys[j]), log);
    }
  }
  float sum = block_sum(mine, warps);

  if (blocks > 1) {
    cluster_wait();  // for all blocks to run, with their barriers initialised
    if (threadIdx.x < blocks) store_async(&others[rank], sum, &exchanged, threadIdx.x);
    mbarrier_wait_parity_cluster(&exchanged, 0);  // for every block's sum; no block ends before it has them
    const int lane_id = threadIdx.x % 32;
    sum = lanes_sum(lane_id < blocks ? others[lane_id] : 0.0f);
  }

  const bool aligned = skew_of(row_out) == skew;
  const auto write = [&](auto gradient) {
#pragma unroll 2
    for (int pack = threadIdx.x; pack < count; pack += THREADS) {
      const Pack<T> douts = held_dout[pack], ys = held_y[pack];
      Pack<T> values;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        set(values, j, from_float<T>(gradient(to_float(douts[j]), to_float(ys[j]))));
      }
      store_pack(row_out, first_of(pack), N, aligned, values);
    }
  };
  if (log) {
    write(LogSoftmaxGradient{sum});
  } else {
    write(SoftmaxGradient{sum});
  }
#endif
}

// Whether there is room for the cluster. No grid runs out of blocks: rows for so many take 4 TiB and more.
template <typename T>
bool launch(const SoftmaxBackwardArgs& args, int blocks) {
  const auto kernel = softmax_backward_v04_cluster_kernel<T>;
  if (most_shared_memory() < 2 * LARGEST_PART) return false;
  allow_shared_memory(kernel, 2 * LARGEST_PART);
  const int part_packs = static_cast<int>(cdiv(most_packs<T>(args.N), blocks));
  ClusterLaunch clusters(reinterpret_cast<const void*>(kernel), blocks, THREADS, 2 * part_packs * 16,
                         args.stream);
  if (clusters.resident() == 0) return false;
  clusters(static_cast<int>(args.M), kernel, static_cast<const T*>(args.dout), static_cast<const T*>(args.y),
           static_cast<T*>(args.out), static_cast<int>(args.N), args.stride_dm, args.stride_ym, blocks,
           part_packs, args.log);
  return true;
}

}  // namespace

void softmax_backward_v04_cluster(const SoftmaxBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (bytes <= REGISTER_ROW) return softmax_backward_v03_rows_per_block(args);
    if (bytes > MOST_BLOCKS * (LARGEST_PART - 16)) return softmax_backward_v01_two_passes(args);
    int blocks = 1;
    while (most_packs<T>(args.N) * 16 > SINGLE_ROW && blocks < MOST_BLOCKS && blocks * PART < bytes)
      blocks *= 2;

    if (!launch<T>(args, blocks)) softmax_backward_v01_two_passes(args);
  });
}
