// layer_norm v05_cluster: the blocks of a cluster share a split row.
//
// Change:   a row of more than 64 KiB is split: it lies in the shared memory of a cluster, one part in each
//           block. A block computes the mean and the squared distances of its part; the blocks send each
//           other both through DSMEM, and merge them by Chan's formula. A cluster takes up to four rows at
//           once, and loads the weights and biases of its columns once for all of them.
// Why:      a row of 256 K elements does not fit one SM. Split over several, it is read once, and each block
//           sends two numbers, once. Weights and biases of long rows would otherwise come from L2 for every
//           row: twice as many bytes as the row itself. Rows of up to 64 KiB keep v04's kernels.
// Counter:  time falls at a row of 65536, against v02's; at a row of 4096, where v04's kernel runs, nothing
//           moves.
// Requires: compute capability 9.0; contiguous rows.
//           - up to 64 KiB: v04_rows_per_block
//           - up to what the shared memory of 16 blocks holds: this step's kernel
//           - longer: v02_welford
// Source:   CUDA C++ Programming Guide, "Distributed Shared Memory"; PTX ISA, "st.async"; quack's norms
//           (clusters by row length); Chan, Golub and LeVeque, The American Statistician 37(3), 1983
// Gap:      Triton gives a program no access to another one's shared memory.
#include "args.h"
#include "lib/cluster.cuh"
#include "lib/ptx/hopper.cuh"
#include "norm/norm.cuh"
#include "norm/norm_mean_squares.h"

void layer_norm_v02_welford(const LayerNormArgs& args);
void layer_norm_v04_rows_per_block(const LayerNormArgs& args);

namespace {

constexpr int THREADS = 384, BLOCKS_PER_SM = 3;
constexpr int64_t BLOCK_ROW = 64 * 1024;      // bytes, up to which v04 holds a row
constexpr int MOST_ROWS = 4;                  // that a cluster takes at once
constexpr int64_t PART_BYTES = 64 * 1024;     // of a block's parts, so that several blocks fit an SM
constexpr int64_t LARGEST_PART = 208 * 1024;  // of a block's parts where one block fills the SM

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
  __device__ int elements() const { return count > 0 ? min(N, first_of(count)) - max(0, first_of(0)) : 0; }
};

// A cluster of `blocks` blocks takes `rows` split rows at once. They lie `period` rows apart, so that all
// have the same skew, and a block the same columns of each. A block holds its parts of them, of at most
// `each` packs, in shared memory, and loads the weights and biases of its columns once for all rows.
template <typename T, Alignment ALIGNMENT>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    layer_norm_v05_cluster_kernel(const LayerNormArgs args, int rows, int period, int blocks, int each) {
#if __CUDA_ARCH__ >= 900
  constexpr bool WHOLE = ALIGNMENT == Alignment::PACK;
  constexpr int SIZE = Pack<T>::SIZE;
  extern __shared__ __align__(128) char memory[];
  __shared__ uint64_t arrived[MOST_ROWS];  // completes when this block's part of the row has arrived
  __shared__ uint64_t exchanged;           // completes when all statistics of all blocks have arrived
  __shared__ MeanSquares others[MOST_ROWS][MOST_CLUSTER_BLOCKS];
  __shared__ float sum_parts[MOST_ROWS][32], square_parts[MOST_ROWS][32];
  __shared__ float means[MOST_ROWS], rstds[MOST_ROWS];

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
    if (blocks > 1) mbarrier_arrive_expect_tx(&exchanged, count * blocks * sizeof(MeanSquares));
  }
  __syncthreads();  // for the barriers to be initialised
  if (blocks > 1) cluster_arrive();

  const float elements = static_cast<float>(max(part.elements(), 1));
  for (int turn = 0; turn < count; ++turn) {
    const NormRow<T> row(args, first_index + turn * period);
    Pack<T>* const packs = held(turn);
    // Loads the ragged packs while the bulk copy is under way, with 0 for elements outside of the row. A
    // thread reads the same packs in all loops below, so what it writes for itself needs no barrier.
#pragma unroll
    for (int end = 0; end < (WHOLE ? 0 : 2); ++end) {
      const int pack = end == 0 ? 0 : part.count - 1;
      if (part.count == 0 || pack % THREADS != threadIdx.x) continue;
      if (!is_whole<T>(part.first_of(pack), N))
        packs[pack] = load_ragged(row.x, part.first_of(pack), N, 0.0f);
    }
    mbarrier_wait_parity(&arrived[turn], 0);  // for the copy of this row
    if (row.residual) {
#pragma unroll 4
      for (int pack = threadIdx.x; pack < part.count; pack += THREADS) {
        packs[pack] = add_residual(row, packs[pack], part.first_of(pack), N);
      }
    }
    float sum = 0.0f;
#pragma unroll 4
    for (int pack = threadIdx.x; pack < part.count; pack += THREADS) {
      const Pack<T> values = packs[pack];
#pragma unroll
      for (int j = 0; j < SIZE; ++j) sum += to_float(values[j]);
    }
    const float mean = block_sum(sum, sum_parts[turn]) / elements;
    float squares = 0.0f;
#pragma unroll 4
    for (int pack = threadIdx.x; pack < part.count; pack += THREADS) {
      const Pack<T> values = packs[pack];
      const int first = part.first_of(pack);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        float distance = to_float(values[j]) - mean;
        if (!WHOLE && (first + j < 0 || first + j >= N)) distance = 0.0f;
        squares = fmaf(distance, distance, squares);
      }
    }
    squares = block_sum(squares, square_parts[turn]);
    if (blocks == 1) {
      if (threadIdx.x == 0) others[turn][0] = {mean, squares};
      continue;
    }
    if (turn == 0) cluster_wait();  // for all blocks to run, with their barriers initialised
    if (threadIdx.x < blocks) store_async(&others[turn][rank], {mean, squares}, &exchanged, threadIdx.x);
  }

  // One warp a row merges the statistics of the row's parts.
  if (blocks > 1) mbarrier_wait_parity_cluster(&exchanged, 0);  // for the statistics of all blocks
  if (blocks == 1) __syncthreads();                             // for this block's own statistics
  if (warp_id < count) {
    const MeanSquares its = lane_id < blocks ? others[warp_id][lane_id] : MeanSquares{};
    // Chan's formula, for all parts at once.
    const float its_elements =
        lane_id < blocks ? static_cast<float>(Part<T>(N, skew, each, lane_id).elements()) : 0.0f;
    const float mean = lanes_sum(its_elements * its.mean) / static_cast<float>(N);
    const float distance = its.mean - mean;
    float squares = its.squares;
    if (its_elements > 0.0f) squares += its_elements * distance * distance;
    const float rstd = rstd_of(lanes_sum(squares), N, args.eps);
    if (lane_id == 0) {
      means[warp_id] = mean;
      rstds[warp_id] = rstd;
      if (rank == 0) {
        args.mean[first_index + warp_id * period] = mean;
        args.rstd[first_index + warp_id * period] = rstd;
      }
    }
  }
  __syncthreads();  // for every row's mean and rstd

  const auto factors_of = [&](const T* factors, int first) {
    return WHOLE ? Pack<T>{__ldg(reinterpret_cast<const uint4*>(factors + first))}
                 : load_factors(factors, first, N);
  };
  for (int pack = threadIdx.x; pack < part.count; pack += THREADS) {
    const int first = part.first_of(pack);
    Pack<T> weights = {}, biases = {};
    if (args.weight) weights = factors_of(first_row.weight, first);
    if (args.bias) biases = factors_of(first_row.bias, first);
    T* out = first_row.out;
#pragma unroll 2
    for (int turn = 0; turn < count; ++turn, out += period * args.N) {
      const Pack<T> results = normalised<Norm::LAYER>(
          first_row, held(turn)[pack], means[turn], rstds[turn], [&] { return weights; },
          [&] { return biases; });
      if (WHOLE) {
        __stwb(reinterpret_cast<uint4*>(out + first), results.words);
      } else {
        store_pack(out, first, N, skew_of(out + first) == 0, results);
      }
    }
  }
#endif
}

// False if the GPU has no room for the cluster, or a row is too long for one.
template <typename T>
bool launch(const LayerNormArgs& args) {
  if (most_shared_memory() < LARGEST_PART) return false;
  const int64_t packs = most_packs<T>(args.x, args.N, args.stride_xm);
  const auto blocks_for = [&](int rows) {
    int blocks = 1;
    while (blocks < MOST_CLUSTER_BLOCKS && rows * packs * 16 > blocks * PART_BYTES) blocks *= 2;
    return blocks;
  };
  // Rows of a cluster share one load of weights and biases: as many rows as leave enough clusters for all
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
  const auto kernel = are_whole<T>(args) ? layer_norm_v05_cluster_kernel<T, Alignment::PACK>
                                         : layer_norm_v05_cluster_kernel<T, Alignment::ELEMENT>;
  allow_shared_memory(kernel, LARGEST_PART);
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), blocks, THREADS, static_cast<int>(bytes),
                       args.stream);
  if (launch.resident() == 0) return false;
  const int period = rows > 1 ? skew_period<T>(args.stride_xm) : 1;
  const int64_t clusters = cdiv(args.M, int64_t{rows} * period) * period;
  launch(static_cast<int>(clusters), kernel, args, rows, period, blocks, each);
  return true;
}

}  // namespace

void layer_norm_v05_cluster(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args.N * static_cast<int64_t>(sizeof(T)) <= BLOCK_ROW) return layer_norm_v04_rows_per_block(args);
    if (!launch<T>(args)) layer_norm_v02_welford(args);
  });
}
