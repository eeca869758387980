// layer_norm_backward v07_dispatch: a table sends rows of every length and skew to the kernel that serves
// them.
//
// Change:   four kernels, and a table of which rows go where (norm_backward_routes.cuh). Lanes of a warp take
//           short rows of whole packs. Other rows of up to some thousand elements travel in tiles: bulk
//           copies bring whole packs to shared memory, where rows are read element by element, and dx goes
//           back likewise. Longer rows of x, dout and dadded travel to a ring in a cluster's shared memory,
//           several ahead; warps and blocks send a row's sums before they write dx of the row before. Where
//           their skew differs between the matrices, packs are shifted together there. Rows that no cluster
//           holds are split over blocks by two
//           launches: the first leaves the sums of each part of a row; in the second a block owns columns.
//           Column sums are added by a kernel that is set up early (programmatic dependent launch).
// Why:      v04's threads receive the next row in registers: few bytes are under way, and none while they
//           wait for their block and for their cluster. v01 read both matrices once more for the columns, and
//           rows of several skews were loaded and stored element by element.
// Counter:  barrier falls to nothing, and dram_share rises a little at rows of 4096; time falls more at rows
//           of 5003, 65536 and 262144, and at rows of several skews.
// Requires: compute capability 9.0; contiguous rows.
// Source:   PTX ISA, "cp.async.bulk", "st.async" and "griddepcontrol"
// Twin:     triton-kernels/norm/layer_norm_backward/v07_dispatch.py
#include "args.h"
#include "norm/norm_backward_routes.cuh"

namespace {

using namespace norm_backward_routes;

template <typename T, int LANES, int PACKS, Affine AFFINE>
__global__ void __launch_bounds__(BACKWARD_LANES_THREADS)
    layer_norm_backward_v07_dispatch_lanes_kernel(const LayerNormBackwardArgs args, float* workspace) {
  backward_by_lanes<T, LANES, PACKS, Norm::LAYER, AFFINE>(args, workspace);
}
template <typename T, int ROW_THREADS, int ITEMS, Affine AFFINE>
__global__ void __launch_bounds__(TILE_BLOCK<ROW_THREADS>, TILE_BLOCKS<ROW_THREADS, ITEMS>)
    layer_norm_backward_v07_dispatch_tiles_kernel(const LayerNormBackwardArgs args,
                                                  const __grid_constant__ BackwardTiles tiles,
                                                  float* workspace) {
  backward_tiles<T, ROW_THREADS, ITEMS, Norm::LAYER, AFFINE>(args, tiles, workspace);
}
template <typename T, int PACKS, Layout LAYOUT, Affine AFFINE>
__global__ void __launch_bounds__(MOST_THREADS<PACKS>, 1)
    layer_norm_backward_v07_dispatch_kernel(const LayerNormBackwardArgs args, const AheadShape shape,
                                            const RowGroups groups, float* workspace) {
  backward_rows_ahead<T, PACKS, Norm::LAYER, LAYOUT, AFFINE>(args, shape, groups, workspace);
}
template <typename T, int WIDTH>
__global__ void __launch_bounds__(STRIP_THREADS, SUMS_BLOCKS)
    layer_norm_backward_v07_dispatch_split_sums_kernel(const LayerNormBackwardArgs args, unsigned groups,
                                                       unsigned parts, int64_t each, GradientSums* sums) {
  leave_gradient_sums<T, Norm::LAYER, WIDTH>(args, groups, parts, each, sums);
}
template <typename T, int WIDTH>
__global__ void __launch_bounds__(STRIP_THREADS, BACKWARD_WRITE_BLOCKS)
    layer_norm_backward_v07_dispatch_split_kernel(const LayerNormBackwardArgs args, const Slices slices,
                                                  int parts, const GradientSums* sums, float* workspace) {
  write_split_gradient<T, Norm::LAYER, WIDTH>(args, slices, parts, sums, workspace);
}
template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* MOST_SUM_WARPS, 2)
    layer_norm_backward_v07_dispatch_add_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                                T* dbias) {
  add_partial_sums_at_once(workspace, groups, N, dweight, dbias);
}

// The kernels, for the table's launches.
struct Kernels {
  static constexpr Norm NORM = Norm::LAYER;
  template <typename T, int LANES, int PACKS, Affine AFFINE>
  static auto lanes() {
    return &layer_norm_backward_v07_dispatch_lanes_kernel<T, LANES, PACKS, AFFINE>;
  }
  template <typename T, int ROW_THREADS, int ITEMS, Affine AFFINE>
  static auto tiles() {
    return &layer_norm_backward_v07_dispatch_tiles_kernel<T, ROW_THREADS, ITEMS, AFFINE>;
  }
  template <typename T, int PACKS, Layout LAYOUT, Affine AFFINE>
  static auto ring() {
    return &layer_norm_backward_v07_dispatch_kernel<T, PACKS, LAYOUT, AFFINE>;
  }
  template <typename T, int WIDTH>
  static auto sums() {
    return &layer_norm_backward_v07_dispatch_split_sums_kernel<T, WIDTH>;
  }
  template <typename T, int WIDTH>
  static auto write() {
    return &layer_norm_backward_v07_dispatch_split_kernel<T, WIDTH>;
  }
  template <typename T>
  static auto add() {
    return &layer_norm_backward_v07_dispatch_add_kernel<T>;
  }
};

}  // namespace

void layer_norm_backward_v07_dispatch(const LayerNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    launch_by_routes<T>(args, Norm::LAYER, [&](By by) { return launch_by<T, Kernels>(args, by); });
  });
  CUDA_CHECK(cudaGetLastError());
}
