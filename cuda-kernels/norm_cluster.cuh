// The kernel of the norms' last forward steps: a row in the registers of several blocks.
#pragma once

#include "norm.cuh"
#include "norm_parts.cuh"

// Of a part of a row.
struct MeanSquares {
  float mean, squares;  // the squared distances from it, summed
};

constexpr int PART_THREADS = 512,
              PART_PACKS = 4;  // of a block; a part is worth 256 threads before a cluster grows

// Clusters of `blocks` blocks take row after row; a block holds its part of the row, `each` packs at most,
// and its weights and biases. The next row is asked for before this one is worked on. All rows of a cluster
// must be skewed alike. Without CENTERED the mean is taken to be 0.
template <typename T, bool CENTERED, bool WHOLE>
__device__ void normalise_by_cluster(const NormArgs& args, int blocks, int each) {
  __shared__ Exchange<MeanSquares> exchange;
  __shared__ float mean_parts[2][32], square_parts[2][32];
  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32;
  const int rank = rank_in_cluster(blocks);
  const int cluster = blockIdx.x / blocks, clusters = gridDim.x / blocks;
  if (blocks > 1) exchange.begin();

  const Parts<T> parts{N, skew_of(static_cast<const T*>(args.x) + cluster * args.stride_xm), each};
  const int start = parts.start(rank), n = parts.count(rank);
  const NormRow<T> first_row(args, cluster, start);
  HeldRow<T, PART_PACKS, CENTERED, WHOLE> held(n, skew_of(first_row.x), threadIdx.x, blockDim.x), next = held;
  Pack<T> weights[PART_PACKS] = {}, biases[PART_PACKS] = {};
#pragma unroll
  for (int i = 0; i < PART_PACKS; ++i) {
    if (args.weight) weights[i] = load_factors(first_row.weight, held.first_of(i), n);
    if (args.bias) biases[i] = load_factors(first_row.bias, held.first_of(i), n);
  }
  next.load(first_row.x);
  if (blocks > 1) exchange.wait_for_all();

  uint32_t turn = 0;
  for (int64_t index = cluster; index < args.M; index += clusters, ++turn) {
    const NormRow<T> row(args, index, start);
#pragma unroll
    for (int i = 0; i < PART_PACKS; ++i) held.packs[i] = next.packs[i];
    if (index + clusters < args.M) next.load(row.x + clusters * args.stride_xm);
    held.finish_load(row);
    float mean = 0.0f;
    if (CENTERED) mean = block_sum(held.sum(), mean_parts[turn % 2]) / static_cast<float>(max(n, 1));
    float squares = block_sum(held.squares(mean), square_parts[turn % 2]);
    if (blocks > 1) {
      const MeanSquares part = exchange({mean, squares}, rank, blocks, turn);
      squares = lanes_sum(part.squares);
      if (CENTERED) {  // Chan's formula, for all parts at once
        const float count = lane_id < blocks ? static_cast<float>(parts.count(lane_id)) : 0.0f;
        mean = lanes_sum(count * part.mean) / static_cast<float>(N);
        const float distance = part.mean - mean;
        squares += lanes_sum(count > 0.0f ? count * distance * distance : 0.0f);
      }
    }
    const float rstd = rstd_of(squares, N, args.eps);
    if (rank == 0 && threadIdx.x == 0) {
      if (CENTERED) args.mean[index] = mean;
      args.rstd[index] = rstd;
    }
    held.write(
        row, mean, rstd, [&](int i, int) { return weights[i]; }, [&](int i, int) { return biases[i]; });
  }
}

// Launches it, as kernel(args, blocks, each). False where the GPU has no room for the cluster, where a row is
// too long for one, or where not enough clusters run at once for all to have rows that are skewed alike.
template <typename T, typename Kernel>
bool launch_by_cluster(const NormArgs& args, Kernel* kernel) {
  const int64_t packs = packs_of<T>(args);
  int blocks = 1;
  while (blocks < MOST_CLUSTER_BLOCKS && packs > blocks * PART_PACKS * PART_THREADS / 2) blocks *= 2;
  const int each = static_cast<int>(cdiv(packs, blocks));
  const int threads = static_cast<int>(cdiv(cdiv(each, PART_PACKS), 32) * 32);
  if (threads > PART_THREADS) return false;
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), blocks, threads, 0, args.stream);
  const int clusters = groups_for(args.M, launch.resident(), skew_period<T>(args.stride_xm));
  if (clusters == 0) return false;
  launch(clusters, kernel, args, blocks, each);
  return true;
}
