// rms_norm_backward v04_rows_ahead: layer_norm_backward's v06, without a mean.
//
// Change:   rows travel to a ring in shared memory several ahead of time, and a row's sums are sent before dx
//           of the row before is written; a kernel that is set up early adds the partial sums.
// Why:      layer_norm_backward's ladder found it: v02's threads load one row ahead, and nothing while they
//           wait for their block and for their cluster.
// Counter:  barrier falls to nothing; dram_share rises, less than expected; time falls a little at rows of
//           4096, more at 5003, 65536 and 262144.
// Requires: compute capability 9.0; contiguous rows.
//           - up to 128 packs: lanes, as in v02
//           - longer, up to 512 KiB, or 366 KiB with dadded, if x, dout, dadded and dx have the same skew in
//             every row: this step's kernel for clusters
//           - others, and rows of more skews than clusters run for: v02_cluster
// Source:   see layer_norm_backward's v06
// Gap:      Triton gives a program no access to another one's shared memory, nor to the barriers that let its
//           warps run apart.
#include "args.h"
#include "norm/norm_backward_ahead.cuh"

void rms_norm_backward_v02_cluster(const RmsNormBackwardArgs& args);

namespace {

// LANES lanes take a row, of at most LANES * PACKS packs.
template <typename T, int LANES, int PACKS, bool WHOLE>
__global__ void __launch_bounds__(LANES_THREADS)
    rms_norm_backward_v04_rows_ahead_lanes_kernel(const RmsNormBackwardArgs args, float* workspace) {
  backward_by_lanes_early<T, LANES, PACKS, false, WHOLE>(args, workspace);
}

// A cluster takes a row, of which a thread has up to PACKS packs.
template <typename T, int PACKS, bool LINED>
__global__ void __launch_bounds__(AHEAD_THREADS, 1)
    rms_norm_backward_v04_rows_ahead_kernel(const RmsNormBackwardArgs args, const AheadShape shape,
                                            const RowGroups groups, float* workspace) {
  backward_rows_ahead<T, PACKS, false, LINED>(args, shape, groups, workspace);
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_WARPS, 2)
    rms_norm_backward_v04_rows_ahead_sum_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                                T* dbias) {
  add_partial_sums_at_once(workspace, groups, N, dweight, dbias);
}

template <typename T, bool WHOLE>
bool launch_lanes(const RmsNormBackwardArgs& args) {
  return choose_lanes(packs_of<T>(args), [&](auto lanes, auto packs) {
    const auto kernel = rms_norm_backward_v04_rows_ahead_lanes_kernel<T, lanes, packs, WHOLE>;
    const int blocks = lanes_blocks<T>(args, kernel, LANES_THREADS / lanes);
    launch_with_early_sums<T>(
        args, blocks, false,
        [&](float* workspace) { kernel<<<blocks, LANES_THREADS, 0, args.stream>>>(args, workspace); },
        rms_norm_backward_v04_rows_ahead_sum_kernel<T>);
  });
}

template <typename T>
bool launch(const RmsNormBackwardArgs& args) {
  if (args.M == 0) return false;
  if (are_whole<T>(args) ? launch_lanes<T, true>(args) : launch_lanes<T, false>(args)) return true;
  if (!are_alike<T>(args)) return false;
  const AheadShape shape = ahead_shape<T>(args);
  const auto kernel_of = [&](auto packs) {
    return shape.lined ? &rms_norm_backward_v04_rows_ahead_kernel<T, packs, true>
                       : &rms_norm_backward_v04_rows_ahead_kernel<T, packs, false>;
  };
  const auto kernel = shape.packs == FEW_PACKS ? kernel_of(std::integral_constant<int, FEW_PACKS>{})
                                               : kernel_of(std::integral_constant<int, MANY_PACKS>{});
  return launch_ahead<T>(args, shape, kernel, false, rms_norm_backward_v04_rows_ahead_sum_kernel<T>);
}

}  // namespace

void rms_norm_backward_v04_rows_ahead(const RmsNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) rms_norm_backward_v02_cluster(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
