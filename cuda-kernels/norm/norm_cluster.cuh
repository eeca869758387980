// Rows in the shared memory of several blocks: the kernel of layer_norm's v05 and rms_norm's v02.
#pragma once

#include "lib/cluster.cuh"
#include "lib/ptx/hopper.cuh"
#include "norm.cuh"
#include "norm_parts.cuh"

// Of a part of a row. Sent as one number of 8 bytes.
struct alignas(8) MeanSquares {
  float mean, squares;  // the squared distances from it, summed
};

constexpr int CLUSTER_THREADS = 384, CLUSTER_BLOCKS = 3;  // of a block, and at once on an SM
constexpr int MOST_ROWS = 4;                              // that a cluster takes side by side
constexpr int64_t PART_BYTES = 64 * 1024;                 // of a block: several fit an SM
constexpr int64_t LARGEST_PART = 208 * 1024;              // one does

// The columns of a row of N elements that block `rank` of a cluster has: `each` packs of memory, the first of
// which begins `skew` elements before the row.
template <typename T>
struct Part {
  static constexpr int SIZE = Pack<T>::SIZE;
  int N, skew, begin, count;  // packs

  __device__ Part(int N, int skew, int each, int rank)
      : N(N),
        skew(skew),
        begin(rank * each),
        count(max(0, min(each, (N + skew + SIZE - 1) / SIZE - begin))) {}

  __device__ int first_of(int pack) const { return (begin + pack) * SIZE - skew; }
  __device__ int elements() const { return count > 0 ? min(N, first_of(count)) - max(0, first_of(0)) : 0; }
};

// A cluster of `blocks` blocks takes `rows` rows at once, which lie `period` apart, so that all are skewed
// alike. Each block holds its part of them, `each` packs at most, in shared memory, and loads weights and
// biases once for all. Without CENTERED the mean is taken to be 0.
template <typename T, bool CENTERED, bool WHOLE>
__device__ void normalise_by_cluster(const NormArgs& args, int rows, int period, int blocks, int each) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE;
  extern __shared__ __align__(128) char memory[];
  __shared__ uint64_t arrived[MOST_ROWS];  // a phase completes when the row's part is there
  __shared__ uint64_t exchanged;           // and when all blocks' numbers of all rows are
  __shared__ MeanSquares others[MOST_ROWS][MOST_CLUSTER_BLOCKS];
  __shared__ float sum_parts[MOST_ROWS][32], square_parts[MOST_ROWS][32];
  __shared__ float means[MOST_ROWS], rstds[MOST_ROWS];

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int rank = blocks > 1 ? static_cast<int>(cluster_block()) : 0;
  const int cluster = blockIdx.x / blocks;
  const int64_t first_index = static_cast<int64_t>(cluster / period) * period * rows + cluster % period;
  int count = 0;  // of rows; all blocks of a cluster have as many
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
    // Of the part's packs the copy engine takes those that are the row's alone.
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
    // What the copy engine leaves, while it is at work; 0 for what lies beside the row. A thread reads the
    // same packs whenever it reads, so what it writes for itself needs no barrier.
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
    float mean = 0.0f;
    if (CENTERED) {
      float sum = 0.0f;
#pragma unroll 4
      for (int pack = threadIdx.x; pack < part.count; pack += CLUSTER_THREADS) {
        const Pack<T> values = packs[pack];
#pragma unroll
        for (int j = 0; j < SIZE; ++j) sum += to_float(values[j]);
      }
      mean = block_sum(sum, sum_parts[turn]) / elements;
    }
    float squares = 0.0f;
#pragma unroll 4
    for (int pack = threadIdx.x; pack < part.count; pack += CLUSTER_THREADS) {
      const Pack<T> values = packs[pack];
      const int first = part.first_of(pack);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        float distance = CENTERED ? to_float(values[j]) - mean : to_float(values[j]);
        if (CENTERED && !WHOLE && (first + j < 0 || first + j >= N)) distance = 0.0f;
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

  // A warp for each row takes together what the parts have.
  if (blocks > 1) mbarrier_wait_parity_cluster(&exchanged, 0);  // no block ends before it has all numbers
  if (blocks == 1) __syncthreads();                             // for this block's own
  if (warp_id < count) {
    const MeanSquares its = lane_id < blocks ? others[warp_id][lane_id] : MeanSquares{};
    float mean = 0.0f, squares = its.squares;
    if (CENTERED) {  // Chan's formula, for all parts at once
      const float its_elements =
          lane_id < blocks ? static_cast<float>(Part<T>(N, skew, each, lane_id).elements()) : 0.0f;
      mean = lanes_sum(its_elements * its.mean) / static_cast<float>(N);
      const float distance = its.mean - mean;
      if (its_elements > 0.0f) squares += its_elements * distance * distance;
    }
    const float rstd = rstd_of(lanes_sum(squares), N, args.eps);
    if (lane_id == 0) {
      means[warp_id] = mean;
      rstds[warp_id] = rstd;
      if (rank == 0) {
        if (CENTERED) args.mean[first_index + warp_id * period] = mean;
        args.rstd[first_index + warp_id * period] = rstd;
      }
    }
  }
  __syncthreads();  // for every row's mean and rstd

  for (int pack = threadIdx.x; pack < part.count; pack += CLUSTER_THREADS) {
    const int first = part.first_of(pack);
    Pack<T> weights = {}, biases = {};
    if (args.weight) weights = load_factors(first_row.weight, first, N);
    if (args.bias) biases = load_factors(first_row.bias, first, N);
    T* out = first_row.out;
#pragma unroll 2
    for (int turn = 0; turn < count; ++turn, out += period * args.N) {
      const Pack<T> results = normalised<CENTERED>(
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

// Launches it, as kernel(args, rows, period, blocks, each). False where the GPU has no room for the cluster,
// or a row is too long for one.
template <typename T, typename Kernel>
bool launch_by_cluster(const NormArgs& args, Kernel* kernel) {
  if (most_shared_memory() < LARGEST_PART) return false;
  const int64_t packs = packs_of<T>(args);
  const auto blocks_for = [&](int rows) {
    int blocks = 1;
    while (blocks < MOST_CLUSTER_BLOCKS && rows * packs * 16 > blocks * PART_BYTES) blocks *= 2;
    return blocks;
  };
  // Several rows share what is loaded of weights and biases, as long as there are enough for all SMs.
  int rows = MOST_ROWS;
  while (rows > 1 && (rows * packs * 16 > MOST_CLUSTER_BLOCKS * PART_BYTES ||
                      args.M / rows * blocks_for(rows) < 2 * multiprocessor_count())) {
    rows /= 2;
  }
  const int blocks = blocks_for(rows);
  const int each = static_cast<int>(cdiv(packs, blocks));
  const int64_t bytes = int64_t{rows} * each * 16;
  if (bytes > LARGEST_PART) return false;
  allow_shared_memory(kernel, LARGEST_PART);
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), blocks, CLUSTER_THREADS,
                       static_cast<int>(bytes), args.stream);
  if (launch.resident() == 0) return false;
  const int period = rows > 1 ? skew_period<T>(args.stride_xm) : 1;
  const int64_t clusters = cdiv(args.M, int64_t{rows} * period) * period;
  launch(static_cast<int>(clusters), kernel, args, rows, period, blocks, each);
  return true;
}
