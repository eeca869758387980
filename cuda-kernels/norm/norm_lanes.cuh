// Short register-resident rows of whole packs in lanes of a warp or in a block: kernels of layer_norm's v12
// and rms_norm's v07. Terms: docs/glossary.md.
#pragma once

#include "lib/ptx/ampere.cuh"
#include "norm_row.cuh"

constexpr int NORM_LANES_THREADS = 128;  // of a block for rows of a warp or less
// Most threads of a block for a row, and packs of a thread: more packs would leave more threads without one.
constexpr int NORM_BLOCK_THREADS = 128, NORM_BLOCK_PACKS = 5;
constexpr int FEW_BLOCKS = 8;  // that run at once on an SM

// Which row LANES lanes of a warp take. Lanes past the last row stay for the shuffles, with the last row's
// values.
template <int LANES>
struct LanesRow {
  int64_t index, inside;  // inside: the last row's where `index` is past it

  __device__ explicit LanesRow(const NormArgs& args)
      : index(static_cast<int64_t>(blockIdx.x) * (NORM_LANES_THREADS / LANES) + threadIdx.x / LANES),
        inside(min(index, args.M - 1)) {}
};

// Computes the statistics of a loaded row, and writes them and its output.
template <int LANES, typename T, int PACKS, Norm NORM>
__device__ void finish_by_lanes(const NormArgs& args, const LanesRow<LANES>& which, const NormRow<T>& row,
                                RegisterRow<T, PACKS, NORM, Alignment::PACK>& held) {
  const float mean = NORM == Norm::LAYER ? lanes_sum<LANES>(held.sum()) / static_cast<float>(held.n) : 0.0f;
  const float rstd = rstd_of(lanes_sum<LANES>(held.squares(mean)), held.n, args.eps);
  if (which.index >= args.M) return;
  if (threadIdx.x % LANES == 0) {
    if (NORM == Norm::LAYER) args.mean[which.index] = mean;
    args.rstd[which.index] = rstd;
  }
  held.write(row, mean, rstd);
}

// LANES lanes of a warp take one row of whole packs, of at most LANES * PACKS; a block takes
// NORM_LANES_THREADS / LANES rows.
template <typename T, int LANES, int PACKS, Norm NORM>
__device__ void normalise_by_lanes(const NormArgs& args) {
  const LanesRow<LANES> which(args);
  const NormRow<T> row(args, which.inside);
  RegisterRow<T, PACKS, NORM, Alignment::PACK> held(args.N, 0, threadIdx.x % LANES, LANES);
  held.load(args, row, which.inside);
  held.finish_load(row);
  finish_by_lanes(args, which, row, held);
}

template <int LANES, typename Kernel>
void launch_lanes(const NormArgs& args, Kernel* kernel) {
  kernel<<<static_cast<unsigned>(cdiv(args.M, NORM_LANES_THREADS / LANES)), NORM_LANES_THREADS, 0,
           args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
}

// Launches kernel_of(LANES, PACKS), which are integral constants. False if a row has more than 128 packs.
template <typename T, typename KernelOf>
bool launch_by_lanes(const NormArgs& args, KernelOf kernel_of) {
  return choose_lanes(args.N / Pack<T>::SIZE,
                      [&](auto lanes, auto packs) { launch_lanes<lanes>(args, kernel_of(lanes, packs)); });
}

// layer_norm where rows are few: a warp takes a row of at most 32 * PACKS whole packs. Weights and biases
// travel to shared memory while it computes the row's statistics: loaded after that, pack by pack, each would
// take a trip to L2 that nothing hides.
template <typename T, int PACKS>
__device__ void normalise_few(const NormArgs& args) {
  constexpr int SIZE = Pack<T>::SIZE;
  __shared__ uint4 weights[32 * PACKS], biases[32 * PACKS];
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (NORM_LANES_THREADS / 32) + threadIdx.x / 32;
  // Warps past the last row stay for the barrier, with the last row's values.
  const int64_t inside = min(index, args.M - 1);
  const NormRow<T> row(args, inside);
  RegisterRow<T, PACKS, Norm::LAYER, Alignment::PACK> held(args.N, 0, threadIdx.x % 32, 32);
  held.load(args, row, inside);
  for (int pack = threadIdx.x; pack < held.n / SIZE; pack += NORM_LANES_THREADS) {
    if (row.weight) cp_async<16>(&weights[pack], row.weight + pack * SIZE, true);
    if (row.bias) cp_async<16>(&biases[pack], row.bias + pack * SIZE, true);
  }
  cp_async_commit_group();
  held.finish_load(row);
  const float mean = lanes_sum(held.sum()) / static_cast<float>(held.n);
  const float rstd = rstd_of(lanes_sum(held.squares(mean)), held.n, args.eps);
  cp_async_wait_group<0>();  // for this thread's weights and biases
  __syncthreads();           // for every thread's weights and biases
  if (index >= args.M) return;
  if (threadIdx.x % 32 == 0) {
    args.mean[index] = mean;
    args.rstd[index] = rstd;
  }
  held.write(
      row, mean, rstd, [&](int, int first) { return Pack<T>{weights[first / SIZE]}; },
      [&](int, int first) { return Pack<T>{biases[first / SIZE]}; });
}

// Launches the kernel for two packs a lane or the one for four. False if not all blocks would run at once.
template <typename T, typename Kernel>
bool launch_few(const NormArgs& args, Kernel* two_packs, Kernel* four_packs) {
  const int64_t blocks = cdiv(args.M, NORM_LANES_THREADS / 32);
  if (blocks > FEW_BLOCKS * multiprocessor_count()) return false;
  const auto kernel = args.N <= 2 * 32 * Pack<T>::SIZE ? two_packs : four_packs;
  kernel<<<static_cast<unsigned>(blocks), NORM_LANES_THREADS, 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
  return true;
}

// A block takes one row of whole packs, of at most blockDim.x * NORM_BLOCK_PACKS.
template <typename T, Norm NORM>
__device__ void normalise_by_block(const NormArgs& args) {
  __shared__ float mean_parts[32], square_parts[32];
  const NormRow<T> row(args, blockIdx.x);
  RegisterRow<T, NORM_BLOCK_PACKS, NORM, Alignment::PACK> held(args.N, 0, threadIdx.x, blockDim.x);
  held.load(args, row, blockIdx.x);
  held.finish_load(row);
  const float mean =
      NORM == Norm::LAYER ? block_sum(held.sum(), mean_parts) / static_cast<float>(held.n) : 0.0f;
  const float rstd = rstd_of(block_sum(held.squares(mean), square_parts), held.n, args.eps);
  if (threadIdx.x == 0) {
    if (NORM == Norm::LAYER) args.mean[blockIdx.x] = mean;
    args.rstd[blockIdx.x] = rstd;
  }
  held.write(row, mean, rstd);
}

template <typename T, typename Kernel>
bool launch_by_block(const NormArgs& args, Kernel* kernel) {
  const int64_t threads = cdiv(cdiv(args.N / Pack<T>::SIZE, NORM_BLOCK_PACKS), 32) * 32;
  if (threads > NORM_BLOCK_THREADS || args.M > INT32_MAX) return false;
  kernel<<<static_cast<unsigned>(args.M), static_cast<unsigned>(threads), 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
  return true;
}
