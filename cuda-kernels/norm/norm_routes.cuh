// Which kernel serves which rows: the table of layer_norm's v12 and rms_norm's v07. Terms: docs/glossary.md.
#pragma once

#include "norm_ahead.cuh"
#include "norm_held_cluster.cuh"
#include "norm_lanes.cuh"
#include "norm_ragged.cuh"
#include "norm_served.h"
#include "norm_shifted_lanes.cuh"
#include "norm_split.cuh"
#include "norm_tile.cuh"
#include "norm_warps.cuh"

namespace norm_routes {

// What has a row at once.
enum class By {
  LANES,            // lanes of a warp, whole packs: normalise_by_lanes
  SHIFTED_LANES,    // so, whole packs of out that are shifted together: normalise_by_shifted_lanes
  FEW,              // a warp, while all rows are under way: normalise_few
  WARPS,            // a warp, whole packs: normalise_by_warps
  RAGGED,           // a warp, any rows: normalise_ragged
  TILE,             // a tile of rows in shared memory: normalise_by_tile
  BLOCK,            // a block: normalise_by_block
  CLUSTER,          // the registers of a cluster: normalise_held
  ONE_ROW,          // so, but a cluster has one row of layer_norm, in small blocks
  LARGE_BLOCK,      // so, but a block of twice the threads has the row
  EARLY,            // so, and weights and biases are realigned while rows travel
  SHIFTED_CLUSTER,  // so, in packs laid out for out
  RING,             // stages of a persistent cluster: normalise_ahead
  SHARED,           // the shared memory of a cluster: normalise_by_cluster
  LAUNCHES,         // nothing: two launches go through it, leave_moments and write_split
};

enum class Skewed { ANYHOW, ALIKE, DIFFER };      // whether all matrices have x's skew in every row
enum class With { ANYTHING, NOTHING, RESIDUAL };  // what is added first

struct Route {
  Of norm;
  Skewed skews;
  Alignment alignment;  // at least; where skews DIFFER, of all but x and the residual
  With added;
  int64_t bytes, rows;  // at most: of a row, and their number
  By by;
  int packs = 0;  // of a thread, where the kernel has several numbers; but see takes_held_packs
};

using enum Of;
using enum Skewed;
using enum Alignment;
using enum With;

constexpr int64_t ANY = INT64_MAX;
constexpr int64_t KIB = 1024;
// Bytes of a row that a cluster holds for each pack of a thread, and in shared memory.
constexpr int64_t HELD_ROW = int64_t{MOST_HELD_PARTS} * 32 * 16,
                  SHARED_ROW = MOST_CLUSTER_BLOCKS * LARGEST_NORM_PART;
// Rows that leave most SMs idle if each has a cluster of the largest size.
constexpr int64_t FEW_ROWS = 64;

// The first line that fits counts, or the next one if its kernel refuses.
constexpr Route ROUTES[] = {
    // Short rows. A warp holds 4 KiB; with a residual no row of it shares weights with others.
    {BOTH, ALIKE, PACK, NOTHING, 256, ANY, By::LANES},
    {BOTH, ALIKE, PACK, NOTHING, 4 * KIB, ANY, By::WARPS},
    {LAYER, ALIKE, PACK, NOTHING, 6 * KIB - 1, ANY, By::BLOCK},
    {RMS, ALIKE, PACK, NOTHING, 8 * KIB - 1, ANY, By::BLOCK},
    {LAYER, ALIKE, PACK, RESIDUAL, 512, ANY, By::LANES},
    {LAYER, ALIKE, PACK, RESIDUAL, 2 * KIB, ANY, By::FEW},
    {BOTH, ALIKE, PACK, RESIDUAL, 2 * KIB, ANY, By::LANES},
    {BOTH, ALIKE, PACK, RESIDUAL, 4 * KIB - 1, ANY, By::BLOCK},
    {LAYER, ALIKE, ELEMENT, NOTHING, SHORTEST_RAGGED_ROW - 1, ANY, By::TILE},
    {RMS, ALIKE, ELEMENT, NOTHING, 2 * KIB, ANY, By::TILE},
    {BOTH, ALIKE, ELEMENT, NOTHING, LONGEST_RAGGED_ROW, ANY, By::RAGGED},
    {BOTH, ALIKE, PACK, RESIDUAL, HELD_ROW * HELD_PACKS, ANY, By::CLUSTER, HELD_PACKS},
    {LAYER, ALIKE, ELEMENT, RESIDUAL, KIB, ANY, By::TILE},
    {RMS, ALIKE, ELEMENT, RESIDUAL, 2 * KIB, ANY, By::TILE},
    {BOTH, ALIKE, ELEMENT, RESIDUAL, LONGEST_RAGGED_ROW, ANY, By::RAGGED},
    {BOTH, DIFFER, PACK, ANYTHING, LONGEST_SHIFTED_LANES_ROW, ANY, By::SHIFTED_LANES},
    {BOTH, DIFFER, ELEMENT, ANYTHING, LONGEST_NORM_TILE_ROW, ANY, By::TILE},
    // Rows that the registers of a cluster hold.
    {LAYER, ALIKE, LINE, NOTHING, 12 * KIB - 1, ANY, By::CLUSTER, FEW_HELD_PACKS},
    {LAYER, ALIKE, LINE, NOTHING, 80 * KIB, ANY, By::ONE_ROW},
    {LAYER, ALIKE, LINE, NOTHING, FEW_HELD_BYTES, ANY, By::CLUSTER, FEW_HELD_PACKS},
    {LAYER, ALIKE, LINE, NOTHING, HELD_ROW / 2 * HELD_PACKS, ANY, By::CLUSTER, HELD_PACKS},
    {LAYER, ALIKE, LINE, NOTHING, HELD_ROW * MOST_HELD_PACKS, ANY, By::CLUSTER, MOST_HELD_PACKS},
    {LAYER, ALIKE, ELEMENT, NOTHING, HELD_ROW * HELD_PACKS, ANY, By::EARLY},
    {RMS, ALIKE, LINE, NOTHING, FEW_HELD_BYTES - 3 * KIB / 2, ANY, By::CLUSTER, FEW_HELD_PACKS},
    {RMS, ALIKE, LINE, NOTHING, FEW_HELD_BYTES, ANY, By::LARGE_BLOCK},
    {RMS, ALIKE, ELEMENT, NOTHING, HELD_ROW * HELD_PACKS, ANY, By::CLUSTER, HELD_PACKS},
    {RMS, ALIKE, ELEMENT, NOTHING, HELD_ROW * MOST_HELD_PACKS, ANY, By::CLUSTER, MOST_HELD_PACKS},
    {BOTH, ALIKE, ELEMENT, RESIDUAL, HELD_ROW * HELD_PACKS, ANY, By::CLUSTER, HELD_PACKS},
    {BOTH, DIFFER, ELEMENT, ANYTHING, HELD_ROW * HELD_PACKS, ANY, By::SHIFTED_CLUSTER, HELD_PACKS},
    {BOTH, DIFFER, ELEMENT, NOTHING, HELD_ROW * MOST_HELD_PACKS, ANY, By::SHIFTED_CLUSTER, MOST_HELD_PACKS},
    // Longer rows. SHARED reads each once, LAUNCHES twice.
    {BOTH, ANYHOW, ELEMENT, ANYTHING, HELD_ROW * MOST_HELD_PACKS, ANY, By::RING},
    {BOTH, ANYHOW, ELEMENT, ANYTHING, ANY, FEW_ROWS, By::LAUNCHES},
    {BOTH, ANYHOW, ELEMENT, ANYTHING, SHARED_ROW, ANY, By::SHARED},
    {BOTH, ANYHOW, ELEMENT, ANYTHING, ANY, ANY, By::LAUNCHES},
};

// Whether all matrices have x's skew in every row.
template <typename T>
bool are_alike(const NormArgs& args) {
  const auto like_x = [&](const void* rows, int64_t stride) {
    return skewed_alike<T>(args.x, args.stride_xm, rows, stride);
  };
  return like_x(args.out, args.N) &&
         (!args.residual || (like_x(args.residual, args.stride_rm) && like_x(args.added, args.N)));
}

template <typename T>
Alignment alignment_of(const NormArgs& args) {
  if (!are_whole<T>(args)) return Alignment::ELEMENT;
  const bool lined =
      args.stride_xm % LINE_ELEMENTS<T> == 0 && reinterpret_cast<uintptr_t>(args.x) % LINE_BYTES == 0;
  return lined ? Alignment::LINE : Alignment::PACK;
}

// Whether a row's threads hold HELD_PACKS each, as the route says, or MOST_HELD_PACKS, because these leave
// fewer lanes without a pack: such lanes take instructions all the same.
template <typename T>
bool takes_held_packs(const NormArgs& args, const Route& route) {
  const int64_t packs = cdiv(args.N, Pack<T>::SIZE);
  return route.packs == HELD_PACKS && held_room(packs, HELD_PACKS) <= held_room(packs, MOST_HELD_PACKS);
}

// Calls launch(route, alignment) by the table until one returns true. `step` is for the message if none does.
template <typename T, Norm NORM, typename Launch>
void launch_by_routes(const NormArgs& args, const char* step, Launch launch) {
  const Skewed skews = are_alike<T>(args) ? Skewed::ALIKE : Skewed::DIFFER;
  const With added = args.residual ? With::RESIDUAL : With::NOTHING;
  const Alignment alignment = alignment_of<T>(args);
  const Alignment of_route = skews == Skewed::DIFFER && writes_packs<T>(args) ? Alignment::PACK : alignment;
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  for (const Route& route : ROUTES) {
    if (!serves(route.norm, NORM)) continue;
    if (route.skews != Skewed::ANYHOW && route.skews != skews) continue;
    if (route.added != With::ANYTHING && route.added != added) continue;
    if (of_route < route.alignment || bytes > route.bytes || args.M > route.rows) continue;
    if (launch(route, alignment)) return;
  }
  throw std::runtime_error(
      "x has " + std::to_string(args.M) + " rows of " + std::to_string(bytes) + " bytes, for which " + step +
      " would launch more blocks than a grid may have: split x's rows over several calls");
}

}  // namespace norm_routes
