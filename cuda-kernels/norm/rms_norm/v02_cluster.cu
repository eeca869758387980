// rms_norm v02_cluster: layer_norm's v04 and v05, without a mean.
//
// Change:   rows of up to 64 KiB are register-resident in a lane to a block, as in layer_norm's v04; longer
//           rows are split over the shared memory of a cluster, as in its v05.
// Why:      layer_norm's ladder found it. The parts of a row exchange one number instead of two, and no bias
//           is loaded. Trials of the kernel ran between the predictions and the recording.
// Counter:  dram_share rises; time falls at a row of 65536.
// Requires: compute capability 9.0; contiguous rows. Rows longer than a cluster's shared memory:
//           v01_two_passes.
// Source:   see layer_norm's v04 and v05
// Gap:      Triton gives a program no access to another one's shared memory.
#include "args.h"
#include "lib/cluster.cuh"
#include "lib/ptx/hopper.cuh"
#include "norm/norm_row.cuh"

void rms_norm_v01_two_passes(const RmsNormArgs& args);

namespace {

constexpr int LANES_THREADS = 128;               // of a block for rows of a warp or less
constexpr int FEW_PACKS = 4, FEW_THREADS = 512;  // for rows of several warps
constexpr int MANY_PACKS = 5, MANY_THREADS = 832;
constexpr int64_t BLOCK_ROW = 64 * 1024;  // bytes, up to which a block holds a row
// For rows of a cluster:
constexpr int CLUSTER_THREADS = 384, BLOCKS_PER_SM = 3;
constexpr int MOST_ROWS = 4;                  // that a cluster takes at once
constexpr int64_t PART_BYTES = 64 * 1024;     // of a block's parts, so that several blocks fit an SM
constexpr int64_t LARGEST_PART = 208 * 1024;  // of a block's parts where one block fills the SM

// LANES lanes take a row, of at most LANES * PACKS packs; a block takes LANES_THREADS / LANES rows.
template <typename T, int LANES, int PACKS, Alignment ALIGNMENT>
__global__ void __launch_bounds__(LANES_THREADS) rms_norm_v02_cluster_lanes_kernel(const RmsNormArgs args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (LANES_THREADS / LANES) + threadIdx.x / LANES;
  // Lanes past the last row stay for the shuffles, with the last row's values.
  const int64_t inside = min(index, args.M - 1);
  const NormRow<T> row(args, inside);
  RegisterRow<T, PACKS, Norm::RMS, ALIGNMENT> held(args.N, skew_of(row.x), threadIdx.x % LANES, LANES);
  held.load(args, row, inside);
  held.finish_load(row);
  const float rstd = rstd_of(lanes_sum<LANES>(held.squares(0.0f)), held.n, args.eps);
  if (index >= args.M) return;
  if (threadIdx.x % LANES == 0) args.rstd[index] = rstd;
  held.write(row, 0.0f, rstd);
}

// A block takes a row, of at most blockDim.x * PACKS packs.
template <typename T, int PACKS, int THREADS, Alignment ALIGNMENT>
__global__ void __launch_bounds__(THREADS) rms_norm_v02_cluster_block_kernel(const RmsNormArgs args) {
  __shared__ float square_parts[32];
  const NormRow<T> row(args, blockIdx.x);
  RegisterRow<T, PACKS, Norm::RMS, ALIGNMENT> held(args.N, skew_of(row.x), threadIdx.x, blockDim.x);
  held.load(args, row, blockIdx.x);
  held.finish_load(row);
  const float rstd = rstd_of(block_sum(held.squares(0.0f), square_parts), held.n, args.eps);
  if (threadIdx.x == 0) args.rstd[blockIdx.x] = rstd;
  held.write(row, 0.0f, rstd);
}

// The part of a split row that block `rank` of a cluster holds: up to `each` packs. The row has N elements,
// and its first pack begins `skew` elements before it.
template <typename T>
struct Part {
  static constexpr int SIZE = Pack<T>::SIZE;
  int N, skew, begin, count;  // begin and count in packs

  __device__ Part(int N, int skew, int each, int rank)
      : N(N),
        skew(skew),
        begin(rank * each),
        count(max(0, min(each, (N + skew + SIZE - 1) / SIZE - begin))) {}

  __device__ int first_of(int pack) const { return (begin + pack) * SIZE - skew; }
};

// A cluster of `blocks` blocks takes `rows` split rows at once. They lie `period` rows apart, so that all
// have the same skew, and a block the same columns of each. A block holds its parts of them, of at most
// `each` packs, in shared memory, and loads the weights of its columns once for all rows.
template <typename T, Alignment ALIGNMENT>
__global__ void __launch_bounds__(CLUSTER_THREADS, BLOCKS_PER_SM)
    rms_norm_v02_cluster_kernel(const RmsNormArgs args, int rows, int period, int blocks, int each) {
#if __CUDA_ARCH__ >= 900
  constexpr bool WHOLE = ALIGNMENT == Alignment::PACK;
  constexpr int SIZE = Pack<T>::SIZE;
  extern __shared__ __align__(128) char memory[];
  __shared__ uint64_t arrived[MOST_ROWS];  // completes when this block's part of the row has arrived
  __shared__ uint64_t exchanged;           // completes when all sums of all blocks have arrived
  __shared__ float others[MOST_ROWS][MOST_CLUSTER_BLOCKS];
  __shared__ float square_parts[MOST_ROWS][32], rstds[MOST_ROWS];

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int rank = blocks > 1 ? static_cast<int>(cluster_block()) : 0;
  const int cluster = blockIdx.x / blocks;
  const int64_t first_index = static_cast<int64_t>(cluster / period) * period * rows + cluster % period;
  int count = 0;  // rows of this cluster, the same in all of its blocks
  while (count < rows && first_index + count * period < args.M) ++count;
  if (count == 0) return;
  const NormRow<T> first_row(args, first_index);
  const int skew = WHOLE ? 0 : skew_of(first_row.x);
  const Part<T> part(N, skew, each, rank);
  const auto held = [&](int turn) { return reinterpret_cast<Pack<T>*>(memory) + turn * each; };

  if (threadIdx.x == 0) {
    for (int turn = 0; turn < count; ++turn) mbarrier_init(&arrived[turn], 1);
    mbarrier_init(&exchanged, 1);
    fence_mbarrier_init();
    // Bulk copies bring whole packs alone; the ragged packs at a row's ends are loaded below.
    const int head = !WHOLE && part.count > 0 && part.first_of(0) < 0 ? 1 : 0;
    const int tail = !WHOLE && part.first_of(part.count) > N ? part.count - 1 : part.count;
    const int bytes = max(0, tail - head) * 16;
    for (int turn = 0; turn < count; ++turn) {
      const T* x = first_row.x + turn * period * args.stride_xm;
      mbarrier_arrive_expect_tx(&arrived[turn], bytes);
      if (bytes > 0) bulk_load(held(turn) + head, x + part.first_of(head), bytes, &arrived[turn]);
    }
    if (blocks > 1) mbarrier_arrive_expect_tx(&exchanged, count * blocks * sizeof(float));
  }
  __syncthreads();  // for the barriers to be initialised
  if (blocks > 1) cluster_arrive();

  for (int turn = 0; turn < count; ++turn) {
    const NormRow<T> row(args, first_index + turn * period);
    Pack<T>* const packs = held(turn);
    // Loads the ragged packs while the bulk copy is under way, with 0 for elements outside of the row. A
    // thread reads the same packs in all loops below, so what it writes for itself needs no barrier.
#pragma unroll
    for (int end = 0; end < (WHOLE ? 0 : 2); ++end) {
      const int pack = end == 0 ? 0 : part.count - 1;
      if (part.count == 0 || pack % CLUSTER_THREADS != threadIdx.x) continue;
      if (!is_whole<T>(part.first_of(pack), N))
        packs[pack] = load_ragged(row.x, part.first_of(pack), N, 0.0f);
    }
    mbarrier_wait_parity(&arrived[turn], 0);  // for the copy of this row
    if (row.residual) {
#pragma unroll 4
      for (int pack = threadIdx.x; pack < part.count; pack += CLUSTER_THREADS) {
        packs[pack] = add_residual(row, packs[pack], part.first_of(pack), N);
      }
    }
    float squares = 0.0f;
#pragma unroll 4
    for (int pack = threadIdx.x; pack < part.count; pack += CLUSTER_THREADS) {
      const Pack<T> values = packs[pack];
#pragma unroll
      for (int j = 0; j < SIZE; ++j) squares = fmaf(to_float(values[j]), to_float(values[j]), squares);
    }
    squares = block_sum(squares, square_parts[turn]);
    if (blocks == 1) {
      if (threadIdx.x == 0) others[turn][0] = squares;
      continue;
    }
    if (turn == 0) cluster_wait();  // for all blocks to run, with their barriers initialised
    if (threadIdx.x < blocks) store_async(&others[turn][rank], squares, &exchanged, threadIdx.x);
  }

  // One warp a row adds up the sums of the row's parts.
  if (blocks > 1) mbarrier_wait_parity_cluster(&exchanged, 0);  // for the sums of all blocks
  if (blocks == 1) __syncthreads();                             // for this block's own sums
  if (warp_id < count) {
    const float squares = lanes_sum(lane_id < blocks ? others[warp_id][lane_id] : 0.0f);
    const float rstd = rstd_of(squares, N, args.eps);
    if (lane_id == 0) {
      rstds[warp_id] = rstd;
      if (rank == 0) args.rstd[first_index + warp_id * period] = rstd;
    }
  }
  __syncthreads();  // for every row's rstd

  for (int pack = threadIdx.x; pack < part.count; pack += CLUSTER_THREADS) {
    const int first = part.first_of(pack);
    Pack<T> weights = {};
    if (args.weight)
      weights = WHOLE ? Pack<T>{__ldg(reinterpret_cast<const uint4*>(first_row.weight + first))}
                      : load_factors(first_row.weight, first, N);
    T* out = first_row.out;
#pragma unroll 2
    for (int turn = 0; turn < count; ++turn, out += period * args.N) {
      const Pack<T> results = normalised<Norm::RMS>(
          first_row, held(turn)[pack], 0.0f, rstds[turn], [&] { return weights; }, [] { return Pack<T>{}; });
      if (WHOLE) {
        __stwb(reinterpret_cast<uint4*>(out + first), results.words);
      } else {
        store_pack(out, first, N, skew_of(out + first) == 0, results);
      }
    }
  }
#endif
}

template <typename T, int PACKS, int THREADS, Alignment ALIGNMENT>
void launch_block(const RmsNormArgs& args, int64_t packs) {
  const int64_t threads = cdiv(cdiv(packs, PACKS), 32) * 32;
  rms_norm_v02_cluster_block_kernel<T, PACKS, THREADS, ALIGNMENT>
      <<<static_cast<unsigned>(args.M), static_cast<unsigned>(threads), 0, args.stream>>>(args);
}

template <typename T, Alignment ALIGNMENT>
void launch(const RmsNormArgs& args) {
  const int64_t packs = most_packs<T>(args.x, args.N, args.stride_xm);
  const bool launched = choose_lanes(packs, [&](auto lanes, auto each) {
    rms_norm_v02_cluster_lanes_kernel<T, lanes, each, ALIGNMENT>
        <<<static_cast<unsigned>(cdiv(args.M, LANES_THREADS / lanes)), LANES_THREADS, 0, args.stream>>>(args);
  });
  if (launched) return;
  // Few packs a thread where they fill whole groups of four warps; else more, so that fewer threads have
  // none.
  if (packs <= FEW_PACKS * FEW_THREADS && packs % (128 * FEW_PACKS) == 0) {
    launch_block<T, FEW_PACKS, FEW_THREADS, ALIGNMENT>(args, packs);
  } else {
    launch_block<T, MANY_PACKS, MANY_THREADS, ALIGNMENT>(args, packs);
  }
}

// False if the GPU has no room for the cluster, or a row is too long for one.
template <typename T>
bool launch_cluster(const RmsNormArgs& args) {
  if (most_shared_memory() < LARGEST_PART) return false;
  const int64_t packs = most_packs<T>(args.x, args.N, args.stride_xm);
  const auto blocks_for = [&](int rows) {
    int blocks = 1;
    while (blocks < MOST_CLUSTER_BLOCKS && rows * packs * 16 > blocks * PART_BYTES) blocks *= 2;
    return blocks;
  };
  // Rows of a cluster share one load of weights: as many rows as leave enough clusters for all
  // SMs.
  int rows = MOST_ROWS;
  while (rows > 1 && (rows * packs * 16 > MOST_CLUSTER_BLOCKS * PART_BYTES ||
                      args.M / rows * blocks_for(rows) < 2 * multiprocessor_count())) {
    rows /= 2;
  }
  const int blocks = blocks_for(rows);
  const int each = static_cast<int>(cdiv(packs, blocks));
  const int64_t bytes = int64_t{rows} * each * 16;
  if (bytes > LARGEST_PART) return false;
  const auto kernel = are_whole<T>(args) ? rms_norm_v02_cluster_kernel<T, Alignment::PACK>
                                         : rms_norm_v02_cluster_kernel<T, Alignment::ELEMENT>;
  allow_shared_memory(kernel, LARGEST_PART);
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), blocks, CLUSTER_THREADS,
                       static_cast<int>(bytes), args.stream);
  if (launch.resident() == 0) return false;
  const int period = rows > 1 ? skew_period<T>(args.stride_xm) : 1;
  const int64_t clusters = cdiv(args.M, int64_t{rows} * period) * period;
  launch(static_cast<int>(clusters), kernel, args, rows, period, blocks, each);
  return true;
}

}  // namespace

void rms_norm_v02_cluster(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args.N * static_cast<int64_t>(sizeof(T)) > BLOCK_ROW) {
      if (!launch_cluster<T>(args)) rms_norm_v01_two_passes(args);
    } else {
      are_whole<T>(args) ? launch<T, Alignment::PACK>(args) : launch<T, Alignment::ELEMENT>(args);
    }
  });
  CUDA_CHECK(cudaGetLastError());
}
