// layer_norm_backward v06_rows_ahead: bulk copies bring rows to a ring ahead of time, and no warp waits for
// its whole block.
//
// Change:   rows of x, dout and dadded travel to a ring in shared memory by bulk copies, each as soon as all
//           warps are done with an older row. Warps and blocks send a row's sums before they write dx of the
//           row before. The last rows go to small groups. The kernel that adds the partial sums has many
//           loads under way at once, and is set up while the kernel before it ends (programmatic dependent
//           launch).
// Why:      v04's threads receive the next row in registers, so few bytes are under way, and none while they
//           wait for their block and for their cluster. Where rows are few, its last kernel walks over
//           hundreds of partial sums in small steps. Triton's v05, which waits for the sums a row later, is
//           faster.
// Counter:  dram_share rises and time falls a little at rows of 4096; time falls more at rows of 5003, 65536
//           and 262144.
// Requires: compute capability 9.0; contiguous rows.
//           - up to 128 packs: lanes, as in v03; but from 65 packs on as longer rows, if there are fewer than
//             64 rows an SM
//           - longer, up to 512 KiB, or 366 KiB with dadded, if x, dout, dadded and dx have the same skew in
//             every row: this step's kernel for clusters
//           - others, and rows of more skews than clusters run for: v04_cluster
// Source:   PTX ISA, "cp.async.bulk", "st.async" and "griddepcontrol"
// Gap:      Triton gives a program no access to another one's shared memory, nor to the barriers that let its
//           warps run apart.
#include "args.h"
#include "norm/norm_backward_ahead.cuh"

void layer_norm_backward_v04_cluster(const LayerNormBackwardArgs& args);

namespace {

// From so many packs on, rows go to clusters if there are few rows an SM: the sums of lanes would take long.
constexpr int LEAST_PACKS = 65, FEW_ROWS = 64;

// LANES lanes take a row, of at most LANES * PACKS packs.
template <typename T, int LANES, int PACKS, bool WHOLE>
__global__ void __launch_bounds__(LANES_THREADS)
    layer_norm_backward_v06_rows_ahead_lanes_kernel(const LayerNormBackwardArgs args, float* workspace) {
  backward_by_lanes_early<T, LANES, PACKS, true, WHOLE>(args, workspace);
}

// A cluster takes a row, of which a thread has up to PACKS packs.
template <typename T, int PACKS, bool LINED>
__global__ void __launch_bounds__(AHEAD_THREADS, 1)
    layer_norm_backward_v06_rows_ahead_kernel(const LayerNormBackwardArgs args, const AheadShape shape,
                                              const RowGroups groups, float* workspace) {
  backward_rows_ahead<T, PACKS, true, LINED>(args, shape, groups, workspace);
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_WARPS, 2)
    layer_norm_backward_v06_rows_ahead_sum_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                                  T* dbias) {
  add_partial_sums_at_once(workspace, groups, N, dweight, dbias);
}

template <typename T, bool WHOLE>
bool launch_lanes(const LayerNormBackwardArgs& args) {
  return choose_lanes(packs_of<T>(args), [&](auto lanes, auto packs) {
    const auto kernel = layer_norm_backward_v06_rows_ahead_lanes_kernel<T, lanes, packs, WHOLE>;
    const int blocks = lanes_blocks<T>(args, kernel, LANES_THREADS / lanes);
    launch_with_early_sums<T>(
        args, blocks, true,
        [&](float* workspace) { kernel<<<blocks, LANES_THREADS, 0, args.stream>>>(args, workspace); },
        layer_norm_backward_v06_rows_ahead_sum_kernel<T>);
  });
}

template <typename T>
bool launch(const LayerNormBackwardArgs& args) {
  if (args.M == 0) return false;
  const bool are_few = packs_of<T>(args) >= LEAST_PACKS && args.M < FEW_ROWS * multiprocessor_count();
  if (!are_few && (are_whole<T>(args) ? launch_lanes<T, true>(args) : launch_lanes<T, false>(args)))
    return true;
  if (!are_alike<T>(args)) return false;
  const AheadShape shape = ahead_shape<T>(args);
  const auto kernel_of = [&](auto packs) {
    return shape.lined ? &layer_norm_backward_v06_rows_ahead_kernel<T, packs, true>
                       : &layer_norm_backward_v06_rows_ahead_kernel<T, packs, false>;
  };
  const auto kernel = shape.packs == FEW_PACKS ? kernel_of(std::integral_constant<int, FEW_PACKS>{})
                                               : kernel_of(std::integral_constant<int, MANY_PACKS>{});
  return launch_ahead<T>(args, shape, kernel, true, layer_norm_backward_v06_rows_ahead_sum_kernel<T>);
}

}  // namespace

void layer_norm_backward_v06_rows_ahead(const LayerNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) layer_norm_backward_v04_cluster(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
