// layer_norm v07_rows_ahead: persistent clusters load rows ahead, and hide the exchange behind the next row.
//
// Change:   clusters are persistent: they draw rows from a counter, and keep weights and biases in registers.
//           The next rows travel to a ring of stages in shared memory meanwhile, and blocks send each other
//           the statistics of one row before they write the row before it. In misaligned rows, single lanes
//           take the elements at the row's ends, where v05 masks packs. Where short rows are few, weights and
//           biases travel to shared memory while a warp computes its row's statistics.
// Why:      v05's clusters load, exchange, write and end; while a cluster waits, its share of the SM loads
//           nothing. Weights and biases come from L2 for every four rows, and those of misaligned rows are
//           shifted together from two packs each time. A warp of v04 asks for them pack by pack, after its
//           row's statistics.
// Counter:  time falls at rows of 50257, 65536 and 262144, and where rows of 1024 are few; at rows of 4096
//           and 5003, where v04's kernel runs, nothing moves.
// Requires: compute capability 9.0; contiguous rows.
//           - 33 to 128 whole packs, if all blocks run at once: this step's kernel for warps
//           - others of up to 32 KiB if they are whole packs, else 48 KiB: v04_rows_per_block, by way of v05
//           - longer, up to 512 KiB: this step's kernel for clusters
//           - beyond that, or with a residual whose skew differs from x's: v05_cluster
// Source:   see v05; the ring is that of CUTLASS's asynchronous pipelines
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "lib/ptx/ampere.cuh"
#include "norm/norm_ahead.cuh"

void layer_norm_v05_cluster(const LayerNormArgs& args);

namespace {

// Bytes of a row up to which one block a row is faster: for whole packs, and for other rows.
constexpr int64_t SHORT_WHOLE = 32 * 1024, SHORT_RAGGED = 48 * 1024;
constexpr int SHORT_THREADS = 128;  // of a block for rows of a warp
constexpr int SHORT_BLOCKS = 8;     // that run at once on an SM

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(AHEAD_THREADS, 1)
    layer_norm_v07_rows_ahead_kernel(const LayerNormArgs args, const Draws draws, int blocks, int each) {
  normalise_ahead<T, AHEAD_PACKS, true, WHOLE>(args, draws, blocks, each);
}

// A warp takes a row of at most 32 * PACKS whole packs. Weights and biases travel to shared memory while it
// computes the row's statistics: loaded after that, pack by pack, each would take a trip to L2 that nothing
// hides.
template <typename T, int PACKS>
__global__ void __launch_bounds__(SHORT_THREADS)
    layer_norm_v07_rows_ahead_warps_kernel(const LayerNormArgs args) {
  constexpr int SIZE = Pack<T>::SIZE;
  __shared__ uint4 weights[32 * PACKS], biases[32 * PACKS];
  const int N = static_cast<int>(args.N);
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (SHORT_THREADS / 32) + threadIdx.x / 32;
  // Warps past the last row stay for the barrier, with the last row's values.
  const NormRow<T> row(args, min(index, args.M - 1));
  HeldRow<T, PACKS, true, true> held(N, 0, threadIdx.x % 32, 32);
  held.load(row.x);
  for (int pack = threadIdx.x; pack < N / SIZE; pack += SHORT_THREADS) {
    if (row.weight) cp_async<16>(&weights[pack], row.weight + pack * SIZE, true);
    if (row.bias) cp_async<16>(&biases[pack], row.bias + pack * SIZE, true);
  }
  cp_async_commit_group();
  held.finish_load(row);
  const float mean = lanes_sum(held.sum()) / static_cast<float>(N);
  const float rstd = rstd_of(lanes_sum(held.squares(mean)), N, args.eps);
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

// Launches the kernel for warps, with two or four packs a lane, if the rows are so few that all their blocks
// run at once. Returns whether it did.
template <typename T>
bool launch_by_warps(const LayerNormArgs& args) {
  const int64_t packs = packs_of<T>(args), blocks = cdiv(args.M, SHORT_THREADS / 32);
  if (!are_whole<T>(args) || packs <= 32 || packs > 128 || blocks > SHORT_BLOCKS * multiprocessor_count())
    return false;
  const auto kernel = packs <= 64 ? layer_norm_v07_rows_ahead_warps_kernel<T, 2>
                                  : layer_norm_v07_rows_ahead_warps_kernel<T, 4>;
  kernel<<<static_cast<unsigned>(blocks), SHORT_THREADS, 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
  return true;
}

template <typename T>
bool launch(const LayerNormArgs& args) {
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  if (bytes <= (are_whole<T>(args) ? SHORT_WHOLE : SHORT_RAGGED)) return launch_by_warps<T>(args);
  return are_whole<T>(args) ? launch_ahead<T>(args, layer_norm_v07_rows_ahead_kernel<T, true>)
                            : launch_ahead<T>(args, layer_norm_v07_rows_ahead_kernel<T, false>);
}

}  // namespace

void layer_norm_v07_rows_ahead(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) layer_norm_v05_cluster(args);
  });
}
