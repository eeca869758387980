// The kernel of softmax's v13 for rows that only the shared memory of a cluster holds. Terms:
// docs/glossary.md.
#pragma once

#include "lib/ptx/hopper.cuh"
#include "register_row.cuh"

constexpr int SHARED_THREADS = 512, SHARED_BLOCKS = MOST_CLUSTER_BLOCKS;
constexpr int COPY_PACKS = 4;   // a thread, of each chunk
constexpr int MOST_CHUNKS = 8;  // of a part
constexpr int64_t LARGEST_PART = 208 * 1024;
constexpr int64_t SHARED_ROW = SHARED_BLOCKS * (LARGEST_PART - LINE_BYTES);  // bytes: the longest row
static_assert(LARGEST_PART / 16 <= MOST_CHUNKS * SHARED_THREADS * COPY_PACKS);

// x: [M, N], rows stride_xm apart; out: [M, N]; rows of x have the skew of out's. Block `rank` of a cluster
// holds the rank-th part of a row in shared memory. Packs are counted from the line in which the row begins,
// and parts are whole lines.
template <typename T, Form FORM>
__device__ void softmax_of_shared_row(const T* __restrict__ x, T* __restrict__ out, int N,
                                      int64_t stride_xm) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, THREADS = SHARED_THREADS, CHUNK = THREADS * COPY_PACKS;
  extern __shared__ __align__(128) char memory[];  // this block's packs of the row
  __shared__ uint64_t arrived[MOST_CHUNKS];        // a phase completes when the chunk has arrived
  __shared__ uint64_t exchanged;                   // and when the pairs of all blocks have
  __shared__ MaxSum warps[32], others[SHARED_BLOCKS];

  const int rank = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const int64_t row = blockIdx.x;
  const T* row_x = x + row * stride_xm;
  T* row_out = out + row * N;
  const int skew = skew_of<LINE_BYTES>(row_x);
  const int packs = (N + skew + SIZE - 1) / SIZE;
  const int each = (packs + SHARED_BLOCKS * LINE_PACKS - 1) / (SHARED_BLOCKS * LINE_PACKS) * LINE_PACKS;
  const int begin = min(rank * each, packs);
  const int count = min(each, packs - begin);
  // The first block has packs before the row: `touching` is its first pack with an element of the row, `own`
  // its first whole pack.
  const int touching = rank == 0 ? skew / SIZE : 0, own = rank == 0 ? (skew + SIZE - 1) / SIZE : 0;
  const auto first_of = [&](int pack) { return (begin + pack) * SIZE - skew; };
  Pack<T>* held = reinterpret_cast<Pack<T>*>(memory);

  if (thread == 0) {
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
    mbarrier_arrive_expect_tx(&exchanged, SHARED_BLOCKS * sizeof(MaxSum));
  }
  __syncthreads();  // waits for the mbarriers to be initialised
  cluster_arrive();

  // Meanwhile the ragged packs at the row's ends; elements beside the row count as minus infinity. Each
  // thread always reads the same packs, so what it loads itself needs no barrier.
#pragma unroll
  for (int end = 0; end < 2; ++end) {
    const int pack = end == 0 ? touching : count - 1;
    if (count == 0 || pack % THREADS != thread || is_whole<T>(first_of(pack), N)) continue;
    held[pack] = load_ragged(row_x, first_of(pack), N, -INFINITY);
  }

  Pack<T> nothing;
#pragma unroll
  for (int j = 0; j < SIZE; ++j) set(nothing, j, from_float<T>(-INFINITY));
  MaxSum mine;
  for (int chunk = 0; chunk * CHUNK < count; ++chunk) {
    mbarrier_wait_parity(&arrived[chunk], 0);  // waits for the copy of this chunk
    Pack<T> values[COPY_PACKS];
    float max = mine.max;
#pragma unroll
    for (int i = 0; i < COPY_PACKS; ++i) {
      const int pack = chunk * CHUNK + i * THREADS + thread;
      if (pack < touching || pack >= count) {
        values[i] = nothing;
        continue;
      }
      values[i] = held[pack];
      max = fmaxf(max, max_of(values[i]));
    }
    mine = {max, rescaled(mine, max)};
#pragma unroll
    for (int i = 0; i < COPY_PACKS; ++i) {
      keep_packed(values[i]);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) mine.sum += exp_of(to_float(values[i][j]) - origin(max));
    }
  }
  MaxSum whole = block_merge(mine, warps);

  cluster_wait();  // waits until all blocks run and have initialised their mbarriers
  if (thread < SHARED_BLOCKS) store_async(&others[rank], whole, &exchanged, thread);
  mbarrier_wait_parity_cluster(&exchanged, 0);  // waits for all pairs, so no block ends too early
  const int lane_id = thread % 32;
  whole = lanes_merge(lane_id < SHARED_BLOCKS ? others[lane_id] : MaxSum{});

  const ResultOf<T, FORM> result(whole);
#pragma unroll 4
  for (int pack = thread; pack < count; pack += THREADS) {
    if (pack < touching) continue;
    Pack<T> values = held[pack];
#pragma unroll
    for (int j = 0; j < SIZE; ++j) set(values, j, from_float<T>(result(to_float(values[j]))));
    store_pack(row_out, first_of(pack), N, true, values);
  }
#endif
}

// Returns false, without a launch, if the GPU has no room for the cluster. The grid is never too large: that
// many long rows would take PiB.
template <typename T, typename Kernel>
bool launch_shared_rows(const SoftmaxArgs& args, Kernel* kernel) {
  if (most_shared_memory() < LARGEST_PART) return false;
  allow_shared_memory(kernel, LARGEST_PART);
  const int64_t packs = most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm);
  const int bytes = static_cast<int>(cdiv(packs, SHARED_BLOCKS * LINE_PACKS)) * LINE_BYTES;
  ClusterLaunch clusters(reinterpret_cast<const void*>(kernel), SHARED_BLOCKS, SHARED_THREADS, bytes,
                         args.stream);
  if (clusters.resident() == 0) return false;
  clusters.by_rows(static_cast<int>(args.M), kernel, static_cast<const T*>(args.x), static_cast<T*>(args.out),
                   static_cast<int>(args.N), args.stride_xm);
  return true;
}
