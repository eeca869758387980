// softmax_backward v06_lines: packs are counted from a line, a multiple of 128 bytes.
//
// Change:   the idea of softmax's v09: the packs of a misaligned row are counted from the start of its first
//           line, so up to seven of them lie before the row; a block's part begins with a line. The kernels
//           are otherwise v03's and v04's.
// Why:      a warp's 32 packs are four lines of L2 instead of parts of five, in three matrices. And a bulk
//           copy is faster if source and destination have the same offset in their lines, which v04's copy of
//           y had not. Trials of the kernel ran before the predictions.
// Counter:  at a row of 4096, which is aligned, nothing changes; the time falls at misaligned rows of 50257,
//           and at rows of 262144.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   up to 96 packs: v03's kernel, as up to seven idle lanes are too many for a short row
//           up to 32 KiB: a block's registers
//           up to 104 KiB: one block's shared memory
//           up to 16 x 104 KiB, less a line a block: a cluster of 2 to 16 blocks
//           longer, or if the GPU has no room for the cluster: v01's kernel
// Source:   see softmax's v09
// Twin:     none, see the spec
#include "args.h"
#include "gradient.cuh"
#include "lib/cluster.cuh"
#include "lib/ptx/hopper.cuh"

void softmax_backward_v01_two_passes(const SoftmaxBackwardArgs& args);
void softmax_backward_v03_rows_per_block(const SoftmaxBackwardArgs& args);

namespace {

constexpr int HELD_PACKS = 3, HELD_THREADS = 704;  // of register-resident rows: packs a thread, most threads
constexpr int64_t WARP_PACKS = 96;                 // up to which v03 gives a row one warp or less
constexpr int THREADS = 512;
constexpr int PACKS = 2;  // a thread, of each row and chunk
constexpr int CHUNK = THREADS * PACKS;
constexpr int MOST_CHUNKS = 8;                // of a part
constexpr int MOST_BLOCKS = 16;               // of a cluster
constexpr int64_t REGISTER_ROW = 32 * 1024;   // bytes of dout's row up to which registers hold both
constexpr int64_t PART = 64 * 1024;           // wanted of a split row: two of them fill an SM
constexpr int64_t LARGEST_PART = 104 * 1024;  // possible: two of them, dout and y, fit an SM
constexpr int64_t SINGLE_ROW = 104 * 1024;    // up to which one block is faster than a cluster
static_assert(LARGEST_PART / 16 <= MOST_CHUNKS * CHUNK);
static_assert(HELD_THREADS * HELD_PACKS >= REGISTER_ROW / 16 + LINE_PACKS, "a skewed row needs a line more");

// dout, y: [M, N], rows stride_dm and stride_ym apart; out: [M, N]. Each block holds a row in registers, of
// at most blockDim.x * HELD_PACKS packs.
template <typename T>
__global__ void __launch_bounds__(HELD_THREADS)
    softmax_backward_v06_lines_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                      T* __restrict__ out, int N, int64_t stride_dm, int64_t stride_ym,
                                      bool log) {
  constexpr int SIZE = Pack<T>::SIZE;
  __shared__ float warps[32];
  const T* row_dout = dout + blockIdx.x * stride_dm;
  const T* row_y = y + blockIdx.x * stride_ym;
  T* row_out = out + static_cast<int64_t>(blockIdx.x) * N;
  const int skew = skew_of<LINE_BYTES>(row_y);
  const bool dout_aligned = skew_of(row_dout) == skew_of(row_y);
  const auto first_of = [&](int i) { return static_cast<int>(i * blockDim.x + threadIdx.x) * SIZE - skew; };

  Pack<T> held_dout[HELD_PACKS], held_y[HELD_PACKS];
  load_whole_packs(held_dout, row_dout, N, dout_aligned, 0.0f, first_of);
  load_whole_packs(held_y, row_y, N, true, 0.0f, first_of);
  load_other_packs(held_dout, row_dout, N, dout_aligned, 0.0f, first_of);
  load_other_packs(held_y, row_y, N, true, 0.0f, first_of);
  float mine = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD_PACKS; ++i) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) mine += term_of(to_float(held_dout[i][j]), to_float(held_y[i][j]), log);
  }
  const float sum = block_sum(mine, warps);

  const bool aligned = skew_of(row_out) == skew_of(row_y);
  const auto write = [&](auto gradient) {
#pragma unroll
    for (int i = 0; i < HELD_PACKS; ++i) {
      keep_packed(held_dout[i]);
      keep_packed(held_y[i]);
      Pack<T> values;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        set(values, j, from_float<T>(gradient(to_float(held_dout[i][j]), to_float(held_y[i][j]))));
      }
      store_pack(row_out, first_of(i), N, aligned, values);
    }
  };
  if (log) {
    write(LogSoftmaxGradient{sum});
  } else {
    write(SoftmaxGradient{sum});
  }
}

// Block `rank` of a cluster holds the rank-th part of a row in shared memory, in at most part_packs packs;
// parts are whole lines.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    softmax_backward_v06_lines_cluster_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                              T* __restrict__ out, int N, int64_t stride_dm,
                                              int64_t stride_ym, int blocks, int part_packs, bool log) {
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
  const int skew = skew_of<LINE_BYTES>(row_y);
  const bool dout_aligned = skew_of(row_dout) == skew_of(row_y);
  const int packs = (N + skew + SIZE - 1) / SIZE;
  const int each = ((packs + blocks - 1) / blocks + LINE_PACKS - 1) / LINE_PACKS * LINE_PACKS;
  const int begin = min(rank * each, packs);
  const int count = min(each, packs - begin);
  // The first block has packs before the row: `touching` is its first pack with an element of the row, `own`
  // its first whole pack.
  const int touching = rank == 0 ? skew / SIZE : 0, own = rank == 0 ? (skew + SIZE - 1) / SIZE : 0;
  const auto first_of = [&](int pack) { return (begin + pack) * SIZE - skew; };
  Pack<T>* held_dout = reinterpret_cast<Pack<T>*>(part);
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
    const int pack = end == 0 ? touching : count - 1;
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

  const bool aligned = skew_of(row_out) == skew_of(row_y);
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

template <typename T>
void launch_block(const SoftmaxBackwardArgs& args, int64_t packs) {
  const int64_t threads = cdiv(cdiv(packs, HELD_PACKS), 32) * 32;
  softmax_backward_v06_lines_kernel<T><<<args.M, threads, 0, args.stream>>>(
      static_cast<const T*>(args.dout), static_cast<const T*>(args.y), static_cast<T*>(args.out),
      static_cast<int>(args.N), args.stride_dm, args.stride_ym, args.log);
  CUDA_CHECK(cudaGetLastError());
}

// Returns false, without a launch, if the GPU has no room for the cluster; rows have at most `packs` packs.
// The grid is never too large: that many long rows would take 4 TiB.
template <typename T>
bool launch(const SoftmaxBackwardArgs& args, int blocks, int64_t packs) {
  const auto kernel = softmax_backward_v06_lines_cluster_kernel<T>;
  if (most_shared_memory() < 2 * LARGEST_PART) return false;
  allow_shared_memory(kernel, 2 * LARGEST_PART);
  const int part_packs = static_cast<int>(cdiv(packs, blocks * LINE_PACKS)) * LINE_PACKS;
  ClusterLaunch clusters(reinterpret_cast<const void*>(kernel), blocks, THREADS, 2 * part_packs * 16,
                         args.stream);
  if (clusters.resident() == 0) return false;
  clusters(static_cast<int>(args.M), kernel, static_cast<const T*>(args.dout), static_cast<const T*>(args.y),
           static_cast<T*>(args.out), static_cast<int>(args.N), args.stride_dm, args.stride_ym, blocks,
           part_packs, args.log);
  return true;
}

}  // namespace

void softmax_backward_v06_lines(const SoftmaxBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (most_packs<T>(args.y, args.N, args.stride_ym) <= WARP_PACKS)
      return softmax_backward_v03_rows_per_block(args);
    const int64_t packs = most_packs<T, LINE_BYTES>(args.y, args.N, args.stride_ym);
    if (bytes <= REGISTER_ROW) return launch_block<T>(args, packs);
    if (bytes > MOST_BLOCKS * (LARGEST_PART - LINE_BYTES)) return softmax_backward_v01_two_passes(args);
    int blocks = 1;
    while (packs * 16 > SINGLE_ROW && blocks < MOST_BLOCKS && blocks * PART < bytes) blocks *= 2;
    if (!launch<T>(args, blocks, packs)) softmax_backward_v01_two_passes(args);
  });
}
