// layer_norm v12_dispatch: a table sends rows of every length and skew to the kernel that serves them.
//
// Change:   four kernels for rows that no kernel before was made for, and a table of which rows go where
//           (norm_routes.cuh). Few rows that no cluster holds are held by blocks of the whole GPU, in shared
//           memory, which exchange the parts' statistics through L2. Longer ones are split by two launches:
//           the first leaves each part's statistics, the second merges them and writes. Where skews differ
//           between matrices, packs are laid out for out, and a pack of x is shifted together from two
//           aligned loads: rows of up to 4 KiB in lanes of a warp, longer ones in the registers of a
//           cluster.
// Why:      with a block a row, few rows leave most SMs idle; rows that are held are read once. Rows of
//           another skew than out's were stored element by element.
// Counter:  none at the cases shown, which stay with v11's kernels; time falls at few long rows, and at
//           rows of several skews.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   - all matrices of one skew, up to 512 KiB: v11_laid_early
//           - other skews, up to 4 KiB: lanes
//           - other skews, up to 512 KiB: cluster; weights and biases start at a multiple of 16 bytes
//           - longer, up to 64 rows: held by the whole GPU, or two launches where that has no room
//           - longer, more rows, as long as the shared memory of a cluster holds one: v11_laid_early
//           - longer: held by the whole GPU, or two launches
// Source:   CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization", for the second
//           launch; Chan, Golub and LeVeque, The American Statistician 37(3), 1983, for the merge
// Twin:     triton-kernels/norm/layer_norm/v12_dispatch.py
#include "args.h"
#include "norm/norm_grid.cuh"
#include "norm/norm_routes.cuh"

void layer_norm_v11_laid_early(const LayerNormArgs& args);

namespace {

template <typename T, int LANES, int PACKS>
__global__ void __launch_bounds__(SHIFTED_THREADS, SHIFTED_BLOCKS<PACKS>)
    layer_norm_v12_dispatch_lanes_kernel(const LayerNormArgs args) {
  normalise_shifted<T, LANES, PACKS, true>(args);
}

// Blocks of HELD_THREADS that an SM must have room for.
template <int PACKS, bool RESIDUAL>
constexpr int BLOCKS = PACKS == MOST_HELD_PACKS || RESIDUAL ? 2 : 3;

template <typename T, int PACKS, bool RESIDUAL>
__global__ void __launch_bounds__(HELD_THREADS, BLOCKS<PACKS, RESIDUAL>)
    layer_norm_v12_dispatch_cluster_kernel(const LayerNormArgs args, int blocks, int period) {
  normalise_held<T, 1, PACKS, true, false, RESIDUAL, false, Skews::DIFFER>(args, blocks, period);
}

template <typename T, Skews SKEWS, Residual RESIDUAL>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS<SKEWS>)
    layer_norm_v12_dispatch_moments_kernel(const LayerNormArgs args, unsigned parts, int each,
                                           Moments* moments) {
  leave_moments<T, true, SKEWS, RESIDUAL>(args, parts, each, moments);
}
template <typename T, Skews SKEWS>
__global__ void __launch_bounds__(SPLIT_THREADS, SPLIT_BLOCKS<SKEWS>)
    layer_norm_v12_dispatch_kernel(const LayerNormArgs args, unsigned parts, int each,
                                   const Moments* moments) {
  write_split<T, true, SKEWS>(args, parts, each, moments);
}

template <typename T, Residual RESIDUAL>
__global__ void __launch_bounds__(GRID_THREADS, 1)
    layer_norm_v12_dispatch_grid_kernel(const LayerNormArgs args, const GridShape shape, GroupCounts* counts,
                                        Moments* numbers) {
  normalise_grid_rows<T, true, RESIDUAL>(args, shape, counts, numbers);
}

template <typename T, int PACKS, bool RESIDUAL>
bool launch_cluster(const LayerNormArgs& args) {
  return launch_held<T, 1, PACKS, true, false, HELD_WARPS, Skews::DIFFER>(
      args, layer_norm_v12_dispatch_cluster_kernel<T, PACKS, RESIDUAL>);
}
template <typename T>
bool launch_by_grid(const LayerNormArgs& args) {
  return args.residual ? launch_grid_rows<T, Residual::ADDED>(
                             args, layer_norm_v12_dispatch_grid_kernel<T, Residual::ADDED>)
                       : launch_grid_rows<T, Residual::NONE>(
                             args, layer_norm_v12_dispatch_grid_kernel<T, Residual::NONE>);
}
template <typename T, Skews SKEWS>
bool launch_launches(const LayerNormArgs& args) {
  // Without a residual the first launch reads x alone, and lays packs out for it.
  const auto moments_kernel = args.residual
                                  ? layer_norm_v12_dispatch_moments_kernel<T, SKEWS, Residual::ADDED>
                                  : layer_norm_v12_dispatch_moments_kernel<T, Skews::ALIKE, Residual::NONE>;
  return launch_split<T>(args, moments_kernel, layer_norm_v12_dispatch_kernel<T, SKEWS>);
}
template <typename T>
bool launch(const LayerNormArgs& args, By by) {
  switch (by) {
    case By::LANES:
      return launch_shifted<T>(
          args, [](auto lanes, auto packs) { return layer_norm_v12_dispatch_lanes_kernel<T, lanes, packs>; });
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

void layer_norm_v12_dispatch(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!launch_by_routes<T>(args, [&](By by) { return launch<T>(args, by); }))
      layer_norm_v11_laid_early(args);
  });
}
