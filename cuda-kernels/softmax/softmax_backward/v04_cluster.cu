// softmax_backward v04_cluster: split rows, held by a cluster of blocks in distributed shared memory.
//
// Change:   the idea of softmax's v07: each block of a cluster holds a part of the rows of dout and y in
//           shared memory, sums it chunk by chunk as the copies arrive, and sends its sum to the other
//           blocks.
// Why:      two rows of 256 K elements are 1 MiB: eight SMs hold that in shared memory, one does not. Every
//           element is read once, and one number a block is exchanged.
// Counter:  at a row of 4096, which goes to v03's kernel, nothing changes.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   rows of dout of up to 32 KiB: v03's kernel
//           up to 104 KiB: one block a row, in its shared memory alone
//           up to 16 x 104 KiB: a cluster of 2 to 16 blocks
//           longer, or if the GPU has no room for the cluster: v01's kernel
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
constexpr int PACKS = 2;  // a thread, of each row and chunk
constexpr int CHUNK = THREADS * PACKS;
constexpr int MOST_CHUNKS = 8;                // of a part
constexpr int MOST_BLOCKS = 16;               // of a cluster
constexpr int64_t REGISTER_ROW = 32 * 1024;   // bytes of dout's row up to which v03 is as fast
constexpr int64_t PART = 64 * 1024;           // wanted of a split row: two of them fill an SM
constexpr int64_t LARGEST_PART = 104 * 1024;  // possible: two of them, dout and y, fit an SM
constexpr int64_t SINGLE_ROW = 104 * 1024;    // up to which one block is faster than a cluster
static_assert(LARGEST_PART / 16 <= MOST_CHUNKS * CHUNK);

// dout, y: [M, N], rows stride_dm and stride_ym apart; out: [M, N]. Block `rank` of a cluster holds the
// rank-th part of a row, in at most part_packs packs.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    softmax_backward_v04_cluster_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                        T* __restrict__ out, int N, int64_t stride_dm, int64_t stride_ym,
                                        int blocks, int part_packs, bool log) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE;
  extern __shared__ __align__(128) char part[];  // this block's packs of dout, then those of y
  __shared__ uint64_t arrived[MOST_CHUNKS];      // a phase completes when both rows' chunk has arrived
  __shared__ uint64_t exchanged;                 // and when the sums of all blocks have
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
      // The copy engine brings the whole packs of the chunk.
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
  __syncthreads();  // waits for the mbarriers to be initialised
  if (blocks > 1) cluster_arrive();

  // Meanwhile what the copy engine cannot bring: the ragged packs, and all of dout if its skew differs. Each
  // thread always reads the same packs, so what it loads itself needs no barrier.
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
    mbarrier_wait_parity(&arrived[chunk], 0);  // waits for the copies of this chunk
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
    cluster_wait();  // waits until all blocks run and have initialised their mbarriers
    if (threadIdx.x < blocks) store_async(&others[rank], sum, &exchanged, threadIdx.x);
    mbarrier_wait_parity_cluster(&exchanged, 0);  // waits for all sums, so no block ends too early
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

// Returns false, without a launch, if the GPU has no room for the cluster. The grid is never too large: that
// many long rows would take 4 TiB.
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
