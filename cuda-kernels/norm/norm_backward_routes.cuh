// Which kernel serves which rows: the table of layer_norm_backward's v07 and rms_norm_backward's v05. Terms:
// docs/glossary.md.
#pragma once

#include "norm_backward_lanes.cuh"
#include "norm_backward_ring.cuh"
#include "norm_backward_split.cuh"
#include "norm_backward_tile.cuh"
#include "norm_served.h"

namespace norm_backward_routes {

// What has a row at once.
enum class By {
  LANES,     // lanes of a warp, by accesses of 16 bytes: backward_by_lanes
  TILES,     // shared memory, with its neighbours, element by element: backward_tiles
  RING,      // a cluster, to which rows travel ahead: backward_rows_ahead
  LAUNCHES,  // nothing: two launches go through it, leave_gradient_sums and write_split_gradient
};

// Rows that a line of the table is for: whole packs in all matrices; ragged ones, whose skew is the same in
// all matrices; or whose skew differs.
enum class Rows { WHOLE, RAGGED, DIFFER, ANY };

// The kernel for up to `rows` rows of up to `bytes` bytes. `sm_rows`: at least so many rows an SM.
struct Route {
  Rows layout;
  Of norm;
  int64_t bytes, sm_rows, rows;
  By by;
};

constexpr int64_t ANY = INT64_MAX, KIB = 1024;
// So few long rows that the second reading finds much of them in L2.
constexpr int64_t FEW_ROWS = 160, LONG_ROW = 128 * KIB;
// So many rows an SM that the sums of lanes, which are added at the end, take a small part of the time.
constexpr int64_t MANY_SM_ROWS = 64;
constexpr int64_t WARP_ROW = 16 * 32 * MOST_LANE_PACKS;
// Longer ragged rows are left to the ring, where they need no copy of dx in shared memory.
constexpr int64_t RAGGED_ROW = 16 * KIB;

// The first line that fits counts, or the next one if its kernel refuses: lanes do if the row is too long for
// them with column sums, tiles if a thread would have too many elements, a ring if no cluster holds its
// stages.
constexpr Route ROUTES[] = {
    {Rows::WHOLE, Of::BOTH, KIB, 0, ANY, By::LANES},
    {Rows::WHOLE, Of::LAYER, WARP_ROW, MANY_SM_ROWS, ANY, By::LANES},
    {Rows::WHOLE, Of::RMS, WARP_ROW, 0, ANY, By::LANES},
    {Rows::WHOLE, Of::BOTH, ANY, 0, ANY, By::RING},
    {Rows::RAGGED, Of::BOTH, RAGGED_ROW, 0, ANY, By::TILES},
    {Rows::RAGGED, Of::BOTH, ANY, 0, ANY, By::RING},
    {Rows::DIFFER, Of::BOTH, ANY, 0, ANY, By::TILES},
    {Rows::DIFFER, Of::BOTH, LONG_ROW, 0, ANY, By::RING},
    {Rows::DIFFER, Of::BOTH, ANY, 0, FEW_ROWS, By::LAUNCHES},
    {Rows::DIFFER, Of::BOTH, ANY, 0, ANY, By::RING},
    {Rows::ANY, Of::BOTH, ANY, 0, ANY, By::LAUNCHES},
};

// Calls launch(By) by the table until one returns true. Without rows, the gradients of weight and bias are 0.
template <typename T, typename Launch>
void launch_by_routes(const NormBackwardArgs& args, Norm norm, Launch launch) {
  if (args.M == 0) {
    for (void* gradient : {args.dweight, args.dbias}) {
      if (gradient) CUDA_CHECK(cudaMemsetAsync(gradient, 0, args.N * sizeof(T), args.stream));
    }
    return;
  }
  const bool alike = are_alike<T>(args);
  const Rows layout = are_whole<T>(args) ? Rows::WHOLE : alike ? Rows::RAGGED : Rows::DIFFER;
  const int64_t bytes = (alike ? packs_of<T>(args) : most_packs<T>(args.N)) * 16;
  for (const Route& route : ROUTES) {
    if (route.layout != Rows::ANY && route.layout != layout) continue;
    if (!serves(route.norm, norm)) continue;
    if (bytes > route.bytes || args.M < route.sm_rows * multiprocessor_count() || args.M > route.rows)
      continue;
    if (launch(route.by)) return;
  }
  throw std::runtime_error("x has " + std::to_string(args.M) + " rows of " + std::to_string(args.N) +
                           " elements, more blocks than a grid has: take v01_rows_then_columns");
}

// Whether there is a weight, or its gradient is wanted.
inline Affine affine_of(const NormBackwardArgs& args) {
  return args.weight || wants_sums(args) ? Affine::GIVEN : Affine::NONE;
}

// The launches of the table's kernels. Kernels of an operation: lanes<T, LANES, PACKS, WHOLE, AFFINE>(), and
// so on, return them.
template <typename T, typename Kernels>
bool launch_by(const NormBackwardArgs& args, By by) {
  constexpr bool CENTERED = Kernels::NORM == Norm::LAYER;
  constexpr auto GIVEN = Affine::GIVEN, NONE = Affine::NONE;
  const auto add = Kernels::template add<T>();
  const bool given = affine_of(args) == GIVEN;
  // The kernels where less than a warp has a row are compiled for weights alone.
  if (by == By::LANES) {
    const auto by_lanes = [&]<Affine AFFINE, int MOST_PACKS>() {
      return launch_lanes<T, MOST_PACKS>(
          args, CENTERED,
          [](auto lanes, auto packs) {
            return Kernels::template lanes < T, lanes, packs, lanes<32 ? GIVEN : AFFINE>();
          },
          add);
    };
    return given ? by_lanes.template operator()<GIVEN, SUMMED_LANE_PACKS<Kernels::NORM>>()
                 : by_lanes.template operator()<NONE, MOST_LANE_PACKS>();
  }
  if (by == By::TILES) {
    const auto tiles = [&]<Affine AFFINE>() {
      return launch_tiles<T>(
          args, CENTERED,
          [](auto threads, auto items) {
            return Kernels::template tiles < T, threads, items, threads<32 ? GIVEN : AFFINE>();
          },
          add);
    };
    return given ? tiles.template operator()<GIVEN>() : tiles.template operator()<NONE>();
  }
  if (by == By::RING) {
    const AheadShape shape = ahead_shape<T>(args);
    const auto ring = [&]<int PACKS, Layout LAYOUT>() {
      return given ? Kernels::template ring<T, PACKS, LAYOUT, GIVEN>()
                   : Kernels::template ring<T, PACKS, LAYOUT, NONE>();
    };
    const auto of_packs = [&]<int PACKS>() {
      if (shape.layout == Layout::LINED) return ring.template operator()<PACKS, Layout::LINED>();
      return shape.layout == Layout::ALIKE ? ring.template operator()<PACKS, Layout::ALIKE>()
                                           : ring.template operator()<PACKS, Layout::DIFFER>();
    };
    const auto kernel = shape.packs == FEW_PACKS ? of_packs.template operator()<FEW_PACKS>()
                                                 : of_packs.template operator()<MANY_PACKS>();
    return launch_backward_ahead<T>(args, shape, kernel, CENTERED, add);
  }
  return with_width<T>(args, [&](auto width) {
    return launch_split_gradient<T>(args, CENTERED, Kernels::template sums<T, width>(),
                                    Kernels::template write<T, width>(), add);
  });
}

}  // namespace norm_backward_routes
