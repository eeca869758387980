// Which kernel serves which rows: the table of softmax's v13. Terms: docs/glossary.md.
#pragma once

#include "cluster_row.cuh"
#include "grid_row.cuh"
#include "held_row.cuh"
#include "lanes_row.cuh"
#include "row_tile.cuh"
#include "shared_row.cuh"
#include "split_row.cuh"

namespace softmax_routes {

// What has a row at once.
enum class By {
  LANES,    // lanes of a warp: softmax_of_lanes_row
  TILE,     // a tile of rows in shared memory: softmax_of_row_tile
  HELD,     // the registers of a warp or a block: softmax_of_held_row
  CLUSTER,  // the registers of a cluster: softmax_of_cluster_row
  SHARED,   // the shared memory of a cluster: softmax_of_shared_row
  GRID,     // the shared memory of blocks of the whole GPU: go_through_grid_rows
  SPLIT,    // nothing: two launches go through it, softmax_of_parts and softmax_of_split_rows
};

// Where the rows of x and of out start. Each one includes those behind it, but for the first two.
enum class Start {
  DIFFER,   // within 16 bytes at another skew than out's
  SHIFTED,  // so, but out's at multiples of 16 bytes, and rows are whole packs
  ALIKE,    // at the same skew
  PACKS,    // at multiples of 16 bytes, and rows are whole packs
  LINES,    // x's at lines
};

// The kernel for rows of up to `bytes` bytes that start so.
struct Route {
  Start least, most;
  int64_t bytes;
  By by;
  int packs = 0;  // of a thread, where the kernel has several numbers
};

constexpr int64_t HELD_ROW = int64_t{BLOCK_THREADS} * BLOCK_PACKS * 16;  // that a block holds
constexpr int64_t PACK_OF_CLUSTER = int64_t{MOST_HELD_PARTS} * 32 * 16;  // that a cluster holds for each pack
constexpr int64_t ANY = INT64_MAX;

// The first line that fits counts, or the next one if its kernel refuses: a misaligned row touches a line
// more than its bytes, not every GPU has room for a cluster, and what L2 keeps needs no grid. The last one
// serves all rows.
constexpr Route ROUTES[] = {
    {Start::SHIFTED, Start::SHIFTED, LANES_ROW, By::LANES},
    {Start::PACKS, Start::LINES, LANES_ROW, By::LANES},
    {Start::DIFFER, Start::ALIKE, LONGEST_TILE_ROW, By::TILE},
    {Start::DIFFER, Start::LINES, HELD_ROW, By::HELD},
    {Start::DIFFER, Start::LINES, PACK_OF_CLUSTER * HELD_PACKS, By::CLUSTER, HELD_PACKS},
    {Start::ALIKE, Start::LINES, PACK_OF_CLUSTER * MOST_HELD_PACKS, By::CLUSTER, MOST_HELD_PACKS},
    {Start::ALIKE, Start::LINES, SHARED_ROW, By::SHARED},
    {Start::DIFFER, Start::LINES, ANY, By::GRID},
    {Start::DIFFER, Start::LINES, ANY, By::SPLIT},
};

template <typename T>
Start start_of(const SoftmaxArgs& args) {
  const bool whole = args.N % Pack<T>::SIZE == 0;
  if (!skewed_alike<T>(args.x, args.stride_xm, args.out, args.N))
    return whole && aligned_to_16_bytes(args.out) ? Start::SHIFTED : Start::DIFFER;
  if (!whole || !aligned_to_16_bytes(args.x)) return Start::ALIKE;
  const bool lined =
      reinterpret_cast<uintptr_t>(args.x) % LINE_BYTES == 0 && args.stride_xm % LINE_ELEMENTS<T> == 0;
  return lined ? Start::LINES : Start::PACKS;
}

// Calls launch(route, start) by the table until one returns true.
template <typename T, typename Launch>
void launch_by_routes(const SoftmaxArgs& args, Launch launch) {
  const Start start = start_of<T>(args);
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  for (const Route& route : ROUTES) {
    if (start < route.least || start > route.most || bytes > route.bytes) continue;
    if (launch(route, start)) return;
  }
}

}  // namespace softmax_routes
