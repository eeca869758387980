// rms_norm_backward v02_cluster: layer_norm_backward's v04, without a mean.
//
// Change:   a persistent kernel keeps the sums of its columns in registers, loads the next row ahead, and
//           splits rows of more than 16 KiB over a cluster, as layer_norm_backward's v02 to v04 do.
// Why:      layer_norm_backward's ladder found it. A row has one sum instead of two, and there is no dbias,
//           so half as many registers hold sums. Trials of the kernel ran between the predictions and the
//           recording.
// Counter:  dram_bytes fall, since three matrices travel instead of five; dram_share rises.
// Requires: compute capability 9.0; contiguous rows. Rows beyond the registers of a cluster:
//           v01_rows_then_columns.
// Source:   see layer_norm_backward's v02 to v04
// Gap:      Triton gives a program no access to another one's shared memory.
#include "args.h"
#include "norm/norm_backward.cuh"

void rms_norm_backward_v01_rows_then_columns(const RmsNormBackwardArgs& args);

namespace {

// One block takes a row of up to SHORT_ROW packs; of a longer row a block takes up to PART packs. If 16
// blocks do not hold a row so, blocks have LONG_THREADS, without registers to load the next row ahead.
constexpr int SHORT_PACKS = 2, SHORT_THREADS = 544, SHORT_ROW = 1025;
constexpr int PACKS = 4, PART_THREADS = 256, PART = PACKS * PART_THREADS, LONG_THREADS = 512;
static_assert(SHORT_PACKS * SHORT_THREADS >= SHORT_ROW);

// A cluster takes a row, of which a block has at most blockDim.x * PACKS packs.
template <typename T, int PACKS, int THREADS, bool WHOLE, bool PREFETCH>
__global__ void __launch_bounds__(THREADS)
    rms_norm_backward_v02_cluster_kernel(const RmsNormBackwardArgs args, int period, int blocks, int each,
                                         float* workspace) {
  backward_by_cluster<T, PACKS, false, WHOLE, PREFETCH>(args, period, blocks, each, workspace);
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    rms_norm_backward_v02_cluster_sum_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                             T* dbias) {
  add_partial_sums(workspace, groups, N, dweight, dbias);
}

template <typename T, bool WHOLE>
bool launch(const RmsNormBackwardArgs& args) {
  const auto sum_kernel = rms_norm_backward_v02_cluster_sum_kernel<T>;
  const int64_t packs = packs_of<T>(args);
  if (packs <= SHORT_ROW) {
    return launch_parts<T>(args,
                           rms_norm_backward_v02_cluster_kernel<T, SHORT_PACKS, SHORT_THREADS, WHOLE, true>,
                           1, SHORT_PACKS, false, sum_kernel);
  }
  int blocks = 2;
  while (blocks < MOST_CLUSTER_BLOCKS && packs > blocks * PART) blocks *= 2;
  if (packs <= blocks * PART) {
    return launch_parts<T>(args, rms_norm_backward_v02_cluster_kernel<T, PACKS, PART_THREADS, WHOLE, true>,
                           blocks, PACKS, false, sum_kernel);
  }
  if (packs > blocks * PACKS * LONG_THREADS) return false;
  return launch_parts<T>(args, rms_norm_backward_v02_cluster_kernel<T, PACKS, LONG_THREADS, WHOLE, false>,
                         blocks, PACKS, false, sum_kernel);
}

}  // namespace

void rms_norm_backward_v02_cluster(const RmsNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!(are_whole<T>(args) ? launch<T, true>(args) : launch<T, false>(args)))
      rms_norm_backward_v01_rows_then_columns(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
