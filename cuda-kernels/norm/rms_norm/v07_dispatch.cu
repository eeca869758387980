// rms_norm v07_dispatch: a table sends rows of every length and skew to the kernel that serves them.
//
// Change:   four kernels for rows that no kernel before was made for, and a table of which rows go where
//           (norm_routes.cuh). Few rows that no cluster holds are held by blocks of the whole GPU, in shared
//           memory, which exchange the parts' statistics through L2. Longer ones are split by two launches:
//           the first leaves each part's sum of squares, the second merges them and writes. Where skews
//           differ between matrices, packs are laid out for out, and a pack of x is shifted together from
//           two aligned loads: rows of up to 4 KiB in lanes of a warp, longer ones in the registers of a
//           cluster.
// Why:      with a block a row, few rows leave most SMs idle; rows that are held are read once. Rows of
//           another skew than out's were stored element by element.
// Counter:  none at the cases shown, which stay with v06's kernels; time falls at few long rows, and at
//           rows of several skews.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   - all matrices of one skew, up to 512 KiB: v06_rows_per_warp
//           - other skews, up to 4 KiB: lanes
//           - other skews, up to 512 KiB: cluster; weights start at a multiple of 16 bytes
//           - longer, up to 64 rows: held by the whole GPU, or two launches where that has no room
//           - longer, more rows, as long as the shared memory of a cluster holds one: v06_rows_per_warp
//           - longer: held by the whole GPU, or two launches
// Source:   CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization", for the second
//           launch; Chan, Golub and LeVeque, The American Statistician 37(3), 1983, for the merge
// Twin:     triton-kernels/norm/rms_norm/v07_dispatch.py
#include "args.h"
#include "norm/norm_grid.cuh"
#include "norm/norm_routes.cuh"

void rms_norm_v06_rows_per_warp(const RmsNormArgs& args);

namespace {

template <typename T, int LANES, int PACKS>
__global__ void __launch_bounds__(SHIFTED_THREADS, SHIFTED_BLOCKS<PACKS>)
    rms_norm_v07_dispatch_lanes_kernel(const RmsNormArgs args) {
  normalise_shifted<T, LANES, PACKS, false>(args);
}

// Blocks of HELD_THREADS that an SM must have room for.
template <int PACKS>
constexpr int BLOCKS = PACKS == MOST_HELD_PACKS ? 2 : 3;

template <typename T, int PACKS, bool RESIDUAL>
__global__ void __launch_bounds__(HELD_THREADS, BLOCKS<PACKS>)
    rms_norm_v07_dispatch_cluster_kernel(const RmsNormArgs args, int blocks, int period) {
  normalise_held<T, 1, PACKS, false, false, RESIDUAL, false, Skews::DIFFER>(args, blocks, period);
}

template <typename T, Skews SKEWS, Residual RESIDUAL>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS<SKEWS>)
    rms_norm_v07_dispatch_moments_kernel(const RmsNormArgs args, unsigned parts, int each, Moments* moments) {
  leave_moments<T, false, SKEWS, RESIDUAL>(args, parts, each, moments);
}
template <typename T, Skews SKEWS>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS<SKEWS>)
    rms_norm_v07_dispatch_kernel(const RmsNormArgs args, unsigned parts, int each, const Moments* moments) {
  write_split<T, false, SKEWS>(args, parts, each, moments);
}

template <typename T, Residual RESIDUAL>
__global__ void __launch_bounds__(GRID_THREADS, 1)
    rms_norm_v07_dispatch_grid_kernel(const RmsNormArgs args, const GridShape shape, GroupCounts* counts,
                                      Moments* numbers) {
  normalise_grid_rows<T, false, RESIDUAL>(args, shape, counts, numbers);
}

template <typename T, int PACKS, bool RESIDUAL>
bool launch_cluster(const RmsNormArgs& args) {
  return launch_held<T, 1, PACKS, false, false, HELD_WARPS, Skews::DIFFER>(
      args, rms_norm_v07_dispatch_cluster_kernel<T, PACKS, RESIDUAL>);
}
template <typename T>
bool launch_by_grid(const RmsNormArgs& args) {
  return args.residual ? launch_grid_rows<T, Residual::ADDED>(
                             args, rms_norm_v07_dispatch_grid_kernel<T, Residual::ADDED>)
                       : launch_grid_rows<T, Residual::NONE>(
                             args, rms_norm_v07_dispatch_grid_kernel<T, Residual::NONE>);
}
template <typename T, Skews SKEWS>
bool launch_launches(const RmsNormArgs& args) {
  // Without a residual the first launch reads x alone, and lays packs out for it.
  const auto moments_kernel = args.residual
                                  ? rms_norm_v07_dispatch_moments_kernel<T, SKEWS, Residual::ADDED>
                                  : rms_norm_v07_dispatch_moments_kernel<T, Skews::ALIKE, Residual::NONE>;
  return launch_split<T>(args, moments_kernel, rms_norm_v07_dispatch_kernel<T, SKEWS>);
}
template <typename T>
bool launch(const RmsNormArgs& args, By by) {
  switch (by) {
    case By::LANES:
      return launch_shifted<T>(
          args, [](auto lanes, auto packs) { return rms_norm_v07_dispatch_lanes_kernel<T, lanes, packs>; });
    case By::CLUSTER:
      return args.residual ? launch_cluster<T, HELD_PACKS, true>(args)
                           : launch_cluster<T, HELD_PACKS, false>(args) ||
                                 launch_cluster<T, MOST_HELD_PACKS, false>(args);
    default:
      if (launch_by_grid<T>(args)) return true;
      return are_whole<T>(args) ? launch_launches<T, Skews::ALIKE>(args)
                                : launch_launches<T, Skews::DIFFER>(args);
  }
}

}  // namespace

void rms_norm_v07_dispatch(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!launch_by_routes<T>(args, [&](By by) { return launch<T>(args, by); }))
      rms_norm_v06_rows_per_warp(args);
  });
}
