// layer_norm_backward v07_dispatch: a table sends rows of every length and skew to the kernel that serves
// them.
//
// Change:   three kernels for rows that no kernel before was made for, and a table of which rows go where
//           (norm_backward_routes.cuh). Rows that no cluster holds are held by blocks of the whole GPU, in
//           shared memory, which exchange their parts' sums through L2; a thread keeps the sums of its
//           columns. Longer ones are split over blocks by two launches: the first leaves the sums of each
//           part of a row; in the second a block owns columns, goes through the rows, merges their sums,
//           writes dx and keeps its columns' sums in registers. Where skews differ between matrices, lanes
//           of a warp have the same columns in all rows; packs are shifted together as they are loaded, and
//           apart between neighbouring lanes as dx is stored.
// Why:      v01 served such long rows with one block a row, and read both matrices once more for the columns;
//           the second launch finds much of few rows in L2. Rows of several skews were loaded and stored
//           element by element.
// Counter:  none at the cases shown, which stay with v06's kernels; time falls at few long rows and at short
//           rows of several skews.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   - all matrices of one skew, up to 512 KiB, or 366 KiB with dadded: v06_rows_ahead
//           - other skews, up to 2 KiB: lanes
//           - other skews, up to 128 KiB, or up to 256 KiB in more than 160 rows: v06_rows_ahead
//           - others of more than 256 KiB: held by the whole GPU, if that has room
//           - others: two launches, and a third that adds column sums where slices of the rows have some each
// Source:   CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization", for the later
//           launches
// Twin:     triton-kernels/norm/layer_norm_backward/v07_dispatch.py
#include "args.h"
#include "norm/norm_backward_grid.cuh"
#include "norm/norm_backward_routes.cuh"

void layer_norm_backward_v06_rows_ahead(const LayerNormBackwardArgs& args);

namespace {

template <typename T, int LANES, int PACKS>
__global__ void __launch_bounds__(LANES_THREADS, SHIFTED_BLOCKS<PACKS>)
    layer_norm_backward_v07_dispatch_lanes_kernel(const LayerNormBackwardArgs args, float* workspace) {
  backward_shifted<T, LANES, PACKS, true>(args, workspace);
}

template <typename T, Skews SKEWS>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS<SKEWS>)
    layer_norm_backward_v07_dispatch_sums_kernel(const LayerNormBackwardArgs args, unsigned parts, int each,
                                                 GradientSums* sums) {
  leave_gradient_sums<T, true, SKEWS>(args, parts, each, sums);
}
template <typename T, Skews SKEWS>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS<SKEWS>)
    layer_norm_backward_v07_dispatch_kernel(const LayerNormBackwardArgs args, const Slices slices, int parts,
                                            const GradientSums* sums, float* workspace) {
  write_split<T, true, SKEWS>(args, slices, parts, sums, workspace);
}
template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_WARPS, 2)
    layer_norm_backward_v07_dispatch_add_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                                T* dbias) {
  add_partial_sums_at_once(workspace, groups, N, dweight, dbias);
}

template <typename T>
__global__ void __launch_bounds__(GRID_THREADS, 1)
    layer_norm_backward_v07_dispatch_grid_kernel(const LayerNormBackwardArgs args, const GridShape shape,
                                                 GroupCounts* counts, GradientSums* numbers,
                                                 float4* outer_sums, float* workspace) {
  backward_of_grid_rows<T, true>(args, shape, counts, numbers, outer_sums, workspace);
}

template <typename T, Skews SKEWS>
bool launch_launches(const LayerNormBackwardArgs& args) {
  return launch_split<T>(args, true, layer_norm_backward_v07_dispatch_sums_kernel<T, SKEWS>,
                         layer_norm_backward_v07_dispatch_kernel<T, SKEWS>,
                         layer_norm_backward_v07_dispatch_add_kernel<T>);
}
template <typename T>
bool launch(const LayerNormBackwardArgs& args, By by) {
  if (by == By::LANES) {
    const auto kernel_of = [](auto lanes, auto packs) {
      return layer_norm_backward_v07_dispatch_lanes_kernel<T, lanes, packs>;
    };
    return launch_shifted<T>(args, true, kernel_of, layer_norm_backward_v07_dispatch_add_kernel<T>);
  }
  if (launch_grid_rows<T, true>(args, layer_norm_backward_v07_dispatch_grid_kernel<T>,
                                layer_norm_backward_v07_dispatch_add_kernel<T>))
    return true;
  return are_whole<T>(args) && aligned_to_16_bytes(args.weight) ? launch_launches<T, Skews::ALIKE>(args)
                                                                : launch_launches<T, Skews::DIFFER>(args);
}

}  // namespace

void layer_norm_backward_v07_dispatch(const LayerNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!launch_by_routes<T>(args, [&](By by) { return launch<T>(args, by); }))
      layer_norm_backward_v06_rows_ahead(args);
  });
}
