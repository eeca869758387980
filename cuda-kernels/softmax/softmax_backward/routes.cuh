// Which kernel serves which rows: the table of softmax_backward's v07. Terms: docs/glossary.md.
#pragma once

#include "grid_row.cuh"
#include "register_rows.cuh"
#include "row_tile.cuh"
#include "shared_row.cuh"
#include "split_row.cuh"

namespace softmax_backward_routes {

// What has a row of dout and one of y at once.
enum class By {
  TILE,    // a tile of rows in shared memory: gradient_of_row_tile
  LANES,   // the registers of a warp: gradient_of_lanes_row
  BLOCK,   // the registers of a block: gradient_of_block_row
  SHARED,  // the shared memory of a block or a cluster: gradient_of_shared_row
  GRID,    // the shared memory of blocks of the whole GPU: go_through_grid_rows
  SPLIT,   // nothing: two launches go through it, sums_of_parts and gradient_of_split_rows
};

// Where the rows of dout, y and out start. Each one includes those behind it, but for the first.
enum class Start {
  DIFFER,  // within 16 bytes at several skews
  ALIKE,   // at the same skew
  PACKS,   // so, and rows are whole packs
};

// The kernel for rows of up to `bytes` bytes that start so.
struct Route {
  Start least, most;
  int64_t bytes;
  By by;
};

constexpr int64_t ANY = INT64_MAX;

// The first line that fits counts, or the next one if its kernel refuses: a misaligned row touches a pack
// more than its bytes, not every GPU has room for a cluster, and what L2 keeps needs no grid. The last one
// serves all rows.
constexpr Route ROUTES[] = {
    {Start::DIFFER, Start::ALIKE, LONGEST_TILE_ROW, By::TILE},
    {Start::DIFFER, Start::PACKS, GRADIENT_LANES_ROW, By::LANES},
    {Start::DIFFER, Start::PACKS, GRADIENT_BLOCK_ROW, By::BLOCK},
    {Start::ALIKE, Start::PACKS, GRADIENT_SHARED_ROW, By::SHARED},
    {Start::DIFFER, Start::DIFFER, GRID_ROW, By::SPLIT},
    {Start::DIFFER, Start::PACKS, ANY, By::GRID},
    {Start::DIFFER, Start::PACKS, ANY, By::SPLIT},
};

template <typename T>
Start start_of(const SoftmaxBackwardArgs& args) {
  const bool alike = skewed_alike<T>(args.y, args.stride_ym, args.out, args.N) &&
                     skewed_alike<T>(args.dout, args.stride_dm, args.out, args.N);
  if (!alike) return Start::DIFFER;
  return args.N % Pack<T>::SIZE == 0 ? Start::PACKS : Start::ALIKE;
}

// Calls launch(route, start) by the table until one returns true.
template <typename T, typename Launch>
void launch_by_routes(const SoftmaxBackwardArgs& args, Launch launch) {
  const Start start = start_of<T>(args);
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  for (const Route& route : ROUTES) {
    if (start < route.least || start > route.most || bytes > route.bytes) continue;
    if (launch(route, start)) return;
  }
}

}  // namespace softmax_backward_routes
