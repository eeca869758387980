// rms_norm v07_dispatch: a table sends rows of every length and skew to the kernel that serves them.
//
// Change:   one table (norm_routes.cuh) sends a call to the kernel that serves its rows: those of the ladder,
//           in several shapes, and kernels for rows that no step was made for. A warp holds a row of up to 4
//           KiB, and shares weights with others; short rows that are no whole packs lie in shared memory, a
//           tile of them a block; where the skew differs between matrices, packs of out are shifted together
//           from two aligned loads; a persistent cluster loads the longest rows ahead; few rows that no
//           cluster holds are split over blocks by two launches.
// Why:      which kernel is fastest depends on a row's length and alignment, and on how many rows there are.
//           With a block a row, few rows leave most SMs idle. Rows of another skew than out's were stored
//           element by element.
// Counter:  none at the case shown, where v05's kernel runs; time falls at short rows, at few long rows, and
//           at rows of several skews.
// Requires: compute capability 9.0; contiguous rows.
// Source:   CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization", for the second
//           launch; Chan, Golub and LeVeque, The American Statistician 37(3), 1983, for the merge
// Twin:     triton-kernels/norm/rms_norm/v07_dispatch.py
#include "args.h"
#include "norm/norm_routes.cuh"

namespace {

using namespace norm_routes;

template <typename T, int LANES, int PACKS>
__global__ void __launch_bounds__(NORM_LANES_THREADS)
    rms_norm_v07_dispatch_lanes_kernel(const RmsNormArgs args) {
  normalise_by_lanes<T, LANES, PACKS, Norm::RMS>(args);
}
template <typename T, int LANES, int PACKS, Residual RESIDUAL>
__global__ void __launch_bounds__(NORM_LANES_THREADS, SHIFTED_LANES_BLOCKS<PACKS>)
    rms_norm_v07_dispatch_shifted_lanes_kernel(const RmsNormArgs args) {
  normalise_by_shifted_lanes<T, LANES, PACKS, Norm::RMS, RESIDUAL>(args);
}
template <typename T, int PACKS, int BLOCKS>
__global__ void __launch_bounds__(WARP_THREADS, BLOCKS)
    rms_norm_v07_dispatch_warps_kernel(const RmsNormArgs args) {
  normalise_by_warps<T, PACKS, Norm::RMS>(args);
}
template <typename T, int PACKS, Residual RESIDUAL>
__global__ void __launch_bounds__(RAGGED_THREADS, RAGGED_BLOCKS<T, PACKS, RESIDUAL>)
    rms_norm_v07_dispatch_ragged_kernel(const RmsNormArgs args, int each, int period) {
  normalise_ragged<T, PACKS, Norm::RMS, RESIDUAL>(args, each, period);
}
template <typename T, int LANES, int ITEMS>
__global__ void __launch_bounds__(NORM_TILE_THREADS, NORM_TILE_BLOCKS<ITEMS>)
    rms_norm_v07_dispatch_tile_kernel(const RmsNormArgs args, const NormTiles tiles) {
  normalise_by_tile<T, LANES, ITEMS, Norm::RMS>(args, tiles);
}
template <typename T>
__global__ void __launch_bounds__(NORM_BLOCK_THREADS)
    rms_norm_v07_dispatch_block_kernel(const RmsNormArgs args) {
  normalise_by_block<T, Norm::RMS>(args);
}
template <typename T, int PACKS, Alignment ALIGNMENT, Residual RESIDUAL, Skews SKEWS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    rms_norm_v07_dispatch_cluster_kernel(const RmsNormArgs args, int blocks, int period) {
  normalise_held<T, 1, PACKS, Norm::RMS, ALIGNMENT, RESIDUAL, Factors::AT_USE, SKEWS>(args, blocks, period);
}
template <typename T, Alignment ALIGNMENT>
__global__ void __launch_bounds__(AHEAD_THREADS, 1)
    rms_norm_v07_dispatch_ring_kernel(const RmsNormArgs args, const Draws draws, int blocks, int each) {
  normalise_ahead<T, AHEAD_PACKS, Norm::RMS, ALIGNMENT>(args, draws, blocks, each);
}
template <typename T, Alignment ALIGNMENT>
__global__ void __launch_bounds__(NORM_CLUSTER_THREADS, NORM_CLUSTER_BLOCKS)
    rms_norm_v07_dispatch_shared_kernel(const RmsNormArgs args, int rows, int period, int blocks, int each) {
  normalise_by_cluster<T, Norm::RMS, ALIGNMENT>(args, rows, period, blocks, each);
}
template <typename T, int WIDTH, Residual RESIDUAL>
__global__ void __launch_bounds__(STRIP_THREADS, MOMENTS_BLOCKS)
    rms_norm_v07_dispatch_moments_kernel(const RmsNormArgs args, unsigned parts, int64_t each,
                                         Moments* moments) {
  leave_moments<T, Norm::RMS, WIDTH, RESIDUAL>(args, parts, each, moments);
}
template <typename T, int WIDTH>
__global__ void __launch_bounds__(STRIP_THREADS, WRITE_BLOCKS<WIDTH>)
    rms_norm_v07_dispatch_kernel(const RmsNormArgs args, unsigned parts, unsigned groups,
                                 const Moments* moments) {
  write_split<T, Norm::RMS, WIDTH>(args, parts, groups, moments);
}

// Blocks that an SM must have room for bound a thread's registers: 64, or 80 where a residual takes some.
template <typename T, int PACKS, Alignment ALIGNMENT, Residual RESIDUAL, int THREADS = HELD_THREADS>
bool launch_cluster(const RmsNormArgs& args) {
  constexpr int BLOCKS = (RESIDUAL == Residual::ADDED ? 768 : 1024) / THREADS;
  return launch_held<T, 1, PACKS, Norm::RMS, ALIGNMENT, THREADS / 32>(
      args,
      rms_norm_v07_dispatch_cluster_kernel<T, PACKS, ALIGNMENT, RESIDUAL, Skews::ALIKE, THREADS, BLOCKS>);
}
template <typename T, Alignment ALIGNMENT>
bool launch_by_packs(const RmsNormArgs& args, int packs) {
  if (args.residual) return launch_cluster<T, HELD_PACKS, ALIGNMENT, Residual::ADDED>(args);
  return packs == HELD_PACKS ? launch_cluster<T, HELD_PACKS, ALIGNMENT, Residual::NONE>(args)
                             : launch_cluster<T, MOST_HELD_PACKS, ALIGNMENT, Residual::NONE>(args);
}
template <typename T, int PACKS, Residual RESIDUAL>
bool launch_shifted_cluster(const RmsNormArgs& args) {
  constexpr int BLOCKS = PACKS == MOST_HELD_PACKS ? 2 : 3;
  const auto launch = [&]<Alignment ALIGNMENT>() {
    return launch_held<T, 1, PACKS, Norm::RMS, ALIGNMENT, HELD_WARPS, Skews::DIFFER>(
        args, rms_norm_v07_dispatch_cluster_kernel<T, PACKS, ALIGNMENT, RESIDUAL, Skews::DIFFER, HELD_THREADS,
                                                   BLOCKS>);
  };
  return writes_packs<T>(args) ? launch.template operator()<Alignment::PACK>()
                               : launch.template operator()<Alignment::ELEMENT>();
}
template <typename T>
bool launch_launches(const RmsNormArgs& args) {
  return with_width<T>(args, [&](auto width) {
    const auto moments_kernel = args.residual
                                    ? rms_norm_v07_dispatch_moments_kernel<T, width, Residual::ADDED>
                                    : rms_norm_v07_dispatch_moments_kernel<T, width, Residual::NONE>;
    return launch_split<T>(args, moments_kernel, rms_norm_v07_dispatch_kernel<T, width>);
  });
}

template <typename T, Residual RESIDUAL>
bool launch_ragged_rows(const RmsNormArgs& args) {
  return launch_ragged<T, RESIDUAL>(
      args, [](auto packs) { return rms_norm_v07_dispatch_ragged_kernel<T, packs, RESIDUAL>; });
}

template <typename T, Residual RESIDUAL>
bool launch_shifted_lanes(const RmsNormArgs& args) {
  return launch_by_shifted_lanes<T>(args, [](auto lanes, auto packs) {
    return rms_norm_v07_dispatch_shifted_lanes_kernel<T, lanes, packs, RESIDUAL>;
  });
}

template <typename T>
bool launch(const RmsNormArgs& args, const Route& route, Alignment alignment) {
  const bool whole = alignment != Alignment::ELEMENT;
  switch (route.by) {
    case By::LANES:
      return launch_by_lanes<T>(
          args, [](auto lanes, auto packs) { return rms_norm_v07_dispatch_lanes_kernel<T, lanes, packs>; });
    case By::SHIFTED_LANES:
      return args.residual ? launch_shifted_lanes<T, Residual::ADDED>(args)
                           : launch_shifted_lanes<T, Residual::NONE>(args);
    case By::WARPS:
      return launch_by_warps<T, Norm::RMS>(
          args, [](auto packs, auto blocks) { return rms_norm_v07_dispatch_warps_kernel<T, packs, blocks>; });
    case By::RAGGED:
      return args.residual ? launch_ragged_rows<T, Residual::ADDED>(args)
                           : launch_ragged_rows<T, Residual::NONE>(args);
    case By::TILE:
      return launch_by_tile<T, Norm::RMS>(
          args, [](auto lanes, auto items) { return rms_norm_v07_dispatch_tile_kernel<T, lanes, items>; });
    case By::BLOCK:
      return launch_by_block<T>(args, rms_norm_v07_dispatch_block_kernel<T>);
    case By::CLUSTER:
      if (route.packs == FEW_HELD_PACKS)
        return launch_cluster<T, FEW_HELD_PACKS, Alignment::LINE, Residual::NONE>(args);
      return alignment == Alignment::LINE ? launch_by_packs<T, Alignment::LINE>(args, route.packs)
                                          : launch_by_packs<T, Alignment::ELEMENT>(args, route.packs);
    case By::LARGE_BLOCK:
      return launch_cluster<T, FEW_HELD_PACKS, Alignment::LINE, Residual::NONE, 2 * HELD_THREADS>(args);
    case By::SHIFTED_CLUSTER:
      if (args.residual) return launch_shifted_cluster<T, HELD_PACKS, Residual::ADDED>(args);
      return takes_held_packs<T>(args, route)
                 ? launch_shifted_cluster<T, HELD_PACKS, Residual::NONE>(args)
                 : launch_shifted_cluster<T, MOST_HELD_PACKS, Residual::NONE>(args);
    case By::RING:
      return launch_ahead<T>(args, whole ? rms_norm_v07_dispatch_ring_kernel<T, Alignment::PACK>
                                         : rms_norm_v07_dispatch_ring_kernel<T, Alignment::ELEMENT>);
    case By::SHARED:
      return launch_by_cluster<T>(args, whole ? rms_norm_v07_dispatch_shared_kernel<T, Alignment::PACK>
                                              : rms_norm_v07_dispatch_shared_kernel<T, Alignment::ELEMENT>);
    case By::LAUNCHES:
      return launch_launches<T>(args);
    case By::FEW:
    case By::ONE_ROW:
    case By::EARLY:
      return false;  // of layer_norm
  }
  return false;
}

}  // namespace

void rms_norm_v07_dispatch(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_by_routes<T, Norm::RMS>(args, "v07_dispatch", [&](const Route& route, Alignment alignment) {
      return launch<T>(args, route, alignment);
    });
  });
}
