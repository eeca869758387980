// The kernel of softmax_backward's v07 for rows that the shared memory of a block or of a cluster holds.
// Terms: docs/glossary.md.
#pragma once

#include "args.h"
#include "gradient.cuh"
#include "lib/cluster.cuh"
#include "lib/ptx/hopper.cuh"

constexpr int GRADIENT_SHARED_THREADS = 512;
constexpr int GRADIENT_COPY_PACKS = 2;                 // a thread, of each row and chunk
constexpr int MOST_GRADIENT_CHUNKS = 8;                // of a part
constexpr int64_t GRADIENT_PART = 64 * 1024;           // wanted of a split row: two of them fill an SM
constexpr int64_t LARGEST_GRADIENT_PART = 104 * 1024;  // possible: two of them, dout and y, fit an SM
constexpr int64_t GRADIENT_SINGLE_ROW = 104 * 1024;    // up to which one block is faster than a cluster
constexpr int64_t GRADIENT_SHARED_ROW =
    MOST_CLUSTER_BLOCKS * (LARGEST_GRADIENT_PART - LINE_BYTES);  // bytes: the longest row
static_assert(LARGEST_GRADIENT_PART / 16 <=
              MOST_GRADIENT_CHUNKS * GRADIENT_SHARED_THREADS * GRADIENT_COPY_PACKS);

// dout, y: [M, N], rows stride_dm and stride_ym apart; out: [M, N]; all have the same skew in each row. Block
// `rank` of a cluster holds the rank-th part of a row in shared memory, in at most part_packs packs. Packs
// are counted from the line in which y's row begins, and parts are whole lines. A bulk copy is faster if
// source and destination have the same offset in their lines.
template <typename T>
__device__ void gradient_of_shared_row(const T* __restrict__ dout, const T* __restrict__ y,
                                       T* __restrict__ out, int N, int64_t stride_dm, int64_t stride_ym,
                                       int blocks, int part_packs, bool log) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, THREADS = GRADIENT_SHARED_THREADS,
                CHUNK = THREADS * GRADIENT_COPY_PACKS;
  extern __shared__ __align__(128) char memory[];     // this block's packs of dout, then those of y
  __shared__ uint64_t arrived[MOST_GRADIENT_CHUNKS];  // a phase completes when both rows' chunk has arrived
  __shared__ uint64_t exchanged;                      // and when the sums of all blocks have
  __shared__ float warps[32], others[MOST_CLUSTER_BLOCKS];

  const int rank = blocks > 1 ? static_cast<int>(cluster_block()) : 0;
  const int64_t row = blockIdx.x / blocks;
  const T* row_dout = dout + row * stride_dm;
  const T* row_y = y + row * stride_ym;
  T* row_out = out + row * N;
  const int skew = skew_of<LINE_BYTES>(row_y);
  const int packs = (N + skew + SIZE - 1) / SIZE;
  const int each = ((packs + blocks - 1) / blocks + LINE_PACKS - 1) / LINE_PACKS * LINE_PACKS;
  const int begin = min(rank * each, packs);
  const int count = min(each, packs - begin);
  // The first block has packs before the row: `touching` is its first pack with an element of the row, `own`
  // its first whole pack.
  const int touching = rank == 0 ? skew / SIZE : 0, own = rank == 0 ? (skew + SIZE - 1) / SIZE : 0;
  const auto first_of = [&](int pack) { return (begin + pack) * SIZE - skew; };
  Pack<T>* held_dout = reinterpret_cast<Pack<T>*>(memory);
  Pack<T>* held_y = held_dout + part_packs;

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
      mbarrier_arrive_expect_tx(&arrived[chunk], 2 * bytes);
      if (bytes == 0) continue;
      bulk_load(held_y + head, row_y + first_of(head), bytes, &arrived[chunk]);
      bulk_load(held_dout + head, row_dout + first_of(head), bytes, &arrived[chunk]);
    }
    if (blocks > 1) mbarrier_arrive_expect_tx(&exchanged, blocks * sizeof(float));
  }
  __syncthreads();  // waits for the mbarriers to be initialised
  if (blocks > 1) cluster_arrive();

  // Meanwhile the ragged packs, which the copy engine cannot bring. Each thread always reads the same packs,
  // so what it loads itself needs no barrier.
#pragma unroll
  for (int end = 0; end < 2; ++end) {
    const int pack = end == 0 ? touching : count - 1;
    if (count == 0 || pack % THREADS != threadIdx.x || is_whole<T>(first_of(pack), N)) continue;
    held_dout[pack] = load_ragged(row_dout, first_of(pack), N, 0.0f);
    held_y[pack] = load_ragged(row_y, first_of(pack), N, 0.0f);
  }

  float mine = 0.0f;
  for (int chunk = 0; chunk * CHUNK < count; ++chunk) {
    mbarrier_wait_parity(&arrived[chunk], 0);  // waits for the copies of this chunk
#pragma unroll
    for (int i = 0; i < GRADIENT_COPY_PACKS; ++i) {
      const int pack = chunk * CHUNK + i * THREADS + static_cast<int>(threadIdx.x);
      if (pack < touching) continue;
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

  const auto write = [&](auto gradient) {
#pragma unroll 2
    for (int pack = threadIdx.x; pack < count; pack += THREADS) {
      if (pack < touching) continue;
      const Pack<T> douts = held_dout[pack], ys = held_y[pack];
      Pack<T> values;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        set(values, j, from_float<T>(gradient(to_float(douts[j]), to_float(ys[j]))));
      }
      store_pack(row_out, first_of(pack), N, true, values);
    }
  };
  if (log) {
    write(PreciseLogGradient<T>{sum});
  } else {
    write(SoftmaxGradient{sum});
  }
#endif
}

// Returns false, without a launch, if the GPU has no room for the cluster. The grid is never too large: that
// many long rows would take TiB.
template <typename T, typename Kernel>
bool launch_shared_rows(const SoftmaxBackwardArgs& args, Kernel* kernel) {
  if (most_shared_memory() < 2 * LARGEST_GRADIENT_PART) return false;
  allow_shared_memory(kernel, 2 * LARGEST_GRADIENT_PART);
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  const int64_t packs = most_packs<T, LINE_BYTES>(args.y, args.N, args.stride_ym);
  int blocks = 1;
  while (packs * 16 > GRADIENT_SINGLE_ROW && blocks < MOST_CLUSTER_BLOCKS && blocks * GRADIENT_PART < bytes)
    blocks *= 2;
  const int part_packs = static_cast<int>(cdiv(packs, blocks * LINE_PACKS)) * LINE_PACKS;
  ClusterLaunch clusters(reinterpret_cast<const void*>(kernel), blocks, GRADIENT_SHARED_THREADS,
                         2 * part_packs * 16, args.stream);
  if (clusters.resident() == 0) return false;
  clusters(static_cast<int>(args.M), kernel, static_cast<const T*>(args.dout), static_cast<const T*>(args.y),
           static_cast<T*>(args.out), static_cast<int>(args.N), args.stride_dm, args.stride_ym, blocks,
           part_packs, args.log);
  return true;
}
