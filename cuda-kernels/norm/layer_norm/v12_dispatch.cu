// layer_norm v12_dispatch: a table sends rows of every length and skew to the kernel that serves them.
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
// Counter:  none at the case shown, where v08's kernel runs; time falls at short rows, at few long rows, and
//           at rows of several skews.
// Requires: compute capability 9.0; contiguous rows.
// Source:   CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization", for the second
//           launch; Chan, Golub and LeVeque, The American Statistician 37(3), 1983, for the merge
// Twin:     triton-kernels/norm/layer_norm/v12_dispatch.py
#include "args.h"
#include "norm/norm_routes.cuh"

namespace {

using namespace norm_routes;

template <typename T, int LANES, int PACKS>
__global__ void __launch_bounds__(NORM_LANES_THREADS)
    layer_norm_v12_dispatch_lanes_kernel(const LayerNormArgs args) {
  normalise_by_lanes<T, LANES, PACKS, Norm::LAYER>(args);
}
template <typename T, int LANES, int PACKS, Residual RESIDUAL>
__global__ void __launch_bounds__(NORM_LANES_THREADS, SHIFTED_LANES_BLOCKS<PACKS>)
    layer_norm_v12_dispatch_shifted_lanes_kernel(const LayerNormArgs args) {
  normalise_by_shifted_lanes<T, LANES, PACKS, Norm::LAYER, RESIDUAL>(args);
}
template <typename T, int PACKS>
__global__ void __launch_bounds__(NORM_LANES_THREADS)
    layer_norm_v12_dispatch_few_kernel(const LayerNormArgs args) {
  normalise_few<T, PACKS>(args);
}
template <typename T, int PACKS, int BLOCKS>
__global__ void __launch_bounds__(WARP_THREADS, BLOCKS)
    layer_norm_v12_dispatch_warps_kernel(const LayerNormArgs args) {
  normalise_by_warps<T, PACKS, Norm::LAYER>(args);
}
template <typename T, int PACKS, Residual RESIDUAL>
__global__ void __launch_bounds__(RAGGED_THREADS, RAGGED_BLOCKS<T, PACKS, RESIDUAL>)
    layer_norm_v12_dispatch_ragged_kernel(const LayerNormArgs args, int each, int period) {
  normalise_ragged<T, PACKS, Norm::LAYER, RESIDUAL>(args, each, period);
}
template <typename T, int LANES, int ITEMS>
__global__ void __launch_bounds__(NORM_TILE_THREADS, NORM_TILE_BLOCKS<ITEMS>)
    layer_norm_v12_dispatch_tile_kernel(const LayerNormArgs args, const NormTiles tiles) {
  normalise_by_tile<T, LANES, ITEMS, Norm::LAYER>(args, tiles);
}
template <typename T>
__global__ void __launch_bounds__(NORM_BLOCK_THREADS)
    layer_norm_v12_dispatch_block_kernel(const LayerNormArgs args) {
  normalise_by_block<T, Norm::LAYER>(args);
}
template <typename T, int PACKS, int ROWS, Alignment ALIGNMENT, Residual RESIDUAL, Factors FACTORS,
          Skews SKEWS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    layer_norm_v12_dispatch_cluster_kernel(const LayerNormArgs args, int blocks, int period) {
  normalise_held<T, ROWS, PACKS, Norm::LAYER, ALIGNMENT, RESIDUAL, FACTORS, SKEWS>(args, blocks, period);
}
template <typename T, Alignment ALIGNMENT>
__global__ void __launch_bounds__(AHEAD_THREADS, 1)
    layer_norm_v12_dispatch_ring_kernel(const LayerNormArgs args, const Draws draws, int blocks, int each) {
  normalise_ahead<T, AHEAD_PACKS, Norm::LAYER, ALIGNMENT>(args, draws, blocks, each);
}
template <typename T, Alignment ALIGNMENT>
__global__ void __launch_bounds__(NORM_CLUSTER_THREADS, NORM_CLUSTER_BLOCKS)
    layer_norm_v12_dispatch_shared_kernel(const LayerNormArgs args, int rows, int period, int blocks,
                                          int each) {
  normalise_by_cluster<T, Norm::LAYER, ALIGNMENT>(args, rows, period, blocks, each);
}
template <typename T, int WIDTH, Residual RESIDUAL>
__global__ void __launch_bounds__(STRIP_THREADS, MOMENTS_BLOCKS)
    layer_norm_v12_dispatch_moments_kernel(const LayerNormArgs args, unsigned parts, int64_t each,
                                           Moments* moments) {
  leave_moments<T, Norm::LAYER, WIDTH, RESIDUAL>(args, parts, each, moments);
}
template <typename T, int WIDTH>
__global__ void __launch_bounds__(STRIP_THREADS, WRITE_BLOCKS<WIDTH>)
    layer_norm_v12_dispatch_kernel(const LayerNormArgs args, unsigned parts, unsigned groups,
                                   const Moments* moments) {
  write_split<T, Norm::LAYER, WIDTH>(args, parts, groups, moments);
}

// BLOCKS: that an SM must have room for, which bounds a thread's registers. A residual takes the registers of
// a cluster's second row.
template <typename T, int PACKS, Alignment ALIGNMENT, Residual RESIDUAL, Factors FACTORS = Factors::AT_USE>
bool launch_cluster(const LayerNormArgs& args) {
  constexpr int ROWS = RESIDUAL == Residual::ADDED ? 1 : 2, BLOCKS = PACKS == MOST_HELD_PACKS ? 2 : 3;
  return launch_held<T, ROWS, PACKS, Norm::LAYER, ALIGNMENT>(
      args, layer_norm_v12_dispatch_cluster_kernel<T, PACKS, ROWS, ALIGNMENT, RESIDUAL, FACTORS, Skews::ALIKE,
                                                   HELD_THREADS, BLOCKS>);
}
template <typename T, int PACKS, Residual RESIDUAL>
bool launch_shifted_cluster(const LayerNormArgs& args) {
  constexpr int BLOCKS = PACKS == MOST_HELD_PACKS || RESIDUAL == Residual::ADDED ? 2 : 3;
  const auto launch = [&]<Alignment ALIGNMENT>() {
    return launch_held<T, 1, PACKS, Norm::LAYER, ALIGNMENT, HELD_WARPS, Skews::DIFFER>(
        args, layer_norm_v12_dispatch_cluster_kernel<T, PACKS, 1, ALIGNMENT, RESIDUAL, Factors::AT_USE,
                                                     Skews::DIFFER, HELD_THREADS, BLOCKS>);
  };
  return writes_packs<T>(args) ? launch.template operator()<Alignment::PACK>()
                               : launch.template operator()<Alignment::ELEMENT>();
}
// One row a cluster, in blocks of four warps, with the number of packs that leaves fewer lanes idle.
template <typename T>
bool launch_one_row(const LayerNormArgs& args) {
  const auto launch = [&]<int PACKS, int BLOCKS>(std::integer_sequence<int, PACKS, BLOCKS>) {
    return launch_held<T, 1, PACKS, Norm::LAYER, Alignment::LINE>(
        args, layer_norm_v12_dispatch_cluster_kernel<T, PACKS, 1, Alignment::LINE, Residual::NONE,
                                                     Factors::AT_USE, Skews::ALIKE, 128, BLOCKS>);
  };
  const int64_t packs = args.N / Pack<T>::SIZE, four = room_of_one_row(packs, 4),
                five = room_of_one_row(packs, 5);
  if (four == NO_ROOM && five == NO_ROOM) return false;
  return four <= five ? launch(std::integer_sequence<int, 4, 8>{})
                      : launch(std::integer_sequence<int, 5, 7>{});
}
template <typename T>
bool launch_launches(const LayerNormArgs& args) {
  return with_width<T>(args, [&](auto width) {
    const auto moments_kernel = args.residual
                                    ? layer_norm_v12_dispatch_moments_kernel<T, width, Residual::ADDED>
                                    : layer_norm_v12_dispatch_moments_kernel<T, width, Residual::NONE>;
    return launch_split<T>(args, moments_kernel, layer_norm_v12_dispatch_kernel<T, width>);
  });
}

template <typename T, Residual RESIDUAL>
bool launch_ragged_rows(const LayerNormArgs& args) {
  return launch_ragged<T, RESIDUAL>(
      args, [](auto packs) { return layer_norm_v12_dispatch_ragged_kernel<T, packs, RESIDUAL>; });
}

template <typename T, Residual RESIDUAL>
bool launch_shifted_lanes(const LayerNormArgs& args) {
  return launch_by_shifted_lanes<T>(args, [](auto lanes, auto packs) {
    return layer_norm_v12_dispatch_shifted_lanes_kernel<T, lanes, packs, RESIDUAL>;
  });
}

template <typename T>
bool launch(const LayerNormArgs& args, const Route& route, Alignment alignment) {
  const bool whole = alignment != Alignment::ELEMENT;
  switch (route.by) {
    case By::LANES:
      return launch_by_lanes<T>(
          args, [](auto lanes, auto packs) { return layer_norm_v12_dispatch_lanes_kernel<T, lanes, packs>; });
    case By::SHIFTED_LANES:
      return args.residual ? launch_shifted_lanes<T, Residual::ADDED>(args)
                           : launch_shifted_lanes<T, Residual::NONE>(args);
    case By::FEW:
      return launch_few<T>(args, layer_norm_v12_dispatch_few_kernel<T, 2>,
                           layer_norm_v12_dispatch_few_kernel<T, 4>);
    case By::WARPS:
      return launch_by_warps<T, Norm::LAYER>(args, [](auto packs, auto blocks) {
        return layer_norm_v12_dispatch_warps_kernel<T, packs, blocks>;
      });
    case By::RAGGED:
      return args.residual ? launch_ragged_rows<T, Residual::ADDED>(args)
                           : launch_ragged_rows<T, Residual::NONE>(args);
    case By::TILE:
      return launch_by_tile<T, Norm::LAYER>(
          args, [](auto lanes, auto items) { return layer_norm_v12_dispatch_tile_kernel<T, lanes, items>; });
    case By::BLOCK:
      return launch_by_block<T>(args, layer_norm_v12_dispatch_block_kernel<T>);
    case By::CLUSTER:
      if (args.residual)
        return alignment == Alignment::LINE
                   ? launch_cluster<T, HELD_PACKS, Alignment::LINE, Residual::ADDED>(args)
                   : launch_cluster<T, HELD_PACKS, Alignment::ELEMENT, Residual::ADDED>(args);
      if (route.packs == FEW_HELD_PACKS)
        return launch_cluster<T, FEW_HELD_PACKS, Alignment::LINE, Residual::NONE>(args);
      return route.packs == HELD_PACKS
                 ? launch_cluster<T, HELD_PACKS, Alignment::LINE, Residual::NONE>(args)
                 : launch_cluster<T, MOST_HELD_PACKS, Alignment::LINE, Residual::NONE>(args);
    case By::ONE_ROW:
      return launch_one_row<T>(args);
    case By::EARLY:
      return launch_cluster<T, HELD_PACKS, Alignment::ELEMENT, Residual::NONE, Factors::EARLY>(args);
    case By::SHIFTED_CLUSTER:
      if (args.residual) return launch_shifted_cluster<T, HELD_PACKS, Residual::ADDED>(args);
      return takes_held_packs<T>(args, route)
                 ? launch_shifted_cluster<T, HELD_PACKS, Residual::NONE>(args)
                 : launch_shifted_cluster<T, MOST_HELD_PACKS, Residual::NONE>(args);
    case By::RING:
      return launch_ahead<T>(args, whole ? layer_norm_v12_dispatch_ring_kernel<T, Alignment::PACK>
                                         : layer_norm_v12_dispatch_ring_kernel<T, Alignment::ELEMENT>);
    case By::SHARED:
      return launch_by_cluster<T>(args, whole ? layer_norm_v12_dispatch_shared_kernel<T, Alignment::PACK>
                                              : layer_norm_v12_dispatch_shared_kernel<T, Alignment::ELEMENT>);
    case By::LAUNCHES:
      return launch_launches<T>(args);
    case By::LARGE_BLOCK:
      return false;  // of rms_norm
  }
  return false;
}

}  // namespace

void layer_norm_v12_dispatch(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_by_routes<T, Norm::LAYER>(args, "v12_dispatch", [&](const Route& route, Alignment alignment) {
      return launch<T>(args, route, alignment);
    });
  });
}
