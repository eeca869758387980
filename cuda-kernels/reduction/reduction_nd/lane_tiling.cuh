// The division of columns among blocks for v06's lanes: tiles of any width, which rows share as they fit.
// Terms: docs/glossary.md.
#pragma once

#include "lib/access.h"
#include "split_columns.cuh"

// What decides: loads in flight a thread, bytes of one, and blocks that the GPU holds at once.
struct LaneLimits {
  int64_t loads, bytes, resident;
};

constexpr int64_t TURNS = 4;    // rounds of loads of a thread, at least, if more blocks would shorten them
constexpr int64_t WAVES = 4;    // blocks come and go so many times, if there is work enough
constexpr int64_t MERGED = 32;  // totals of a thread of the last block, at most, if the GPU is full
constexpr int64_t BUSY = THREADS * 3 / 4;  // threads of a block, at least

// The same columns by single elements.
template <typename T>
Tiling narrowed(Tiling tiling) {
  if (!tiling.wide) return tiling;
  tiling.wide = false;
  tiling.kept.set_inner({tiling.kept.inner().size * Pack<T>::SIZE, 1, tiling.column_step});
  return tiling;
}

// Parts a tile. Many blocks of some rounds even out what SMs differ in. If the work is too little for that,
// all blocks are resident from the start.
inline int64_t lane_parts_of(const Tiling& tiling, const LaneLimits& limits) {
  if (tiling.tiles > COUNTERS) return 1;
  const int64_t sharing = tiling.sharing(), rounds = cdiv(tiling.units(), sharing * limits.loads);
  const int64_t at_once = limits.resident / tiling.tiles;
  const int64_t merged = std::max(MERGED * sharing, at_once);
  const int64_t many = std::min({WAVES * limits.resident / tiling.tiles, rounds / TURNS, merged});
  if (at_once == 0 || many * tiling.tiles >= 2 * limits.resident) return std::max(many, int64_t{1});
  return std::max(std::min(at_once, rounds), int64_t{1});
}

// Gives the tiles a width. Their columns are neighbours, also across matrices.
inline void set_width(Tiling& tiling, int64_t width) {
  tiling.tiles = cdiv(tiling.kept.count, width);
  tiling.columns = static_cast<int>(cdiv(tiling.kept.count, tiling.tiles));  // alike, so that few are idle
}

// Narrow rows that lie close together fill whole blocks: then a tile is one matrix's columns. Not if tiles
// are so few that their last blocks would merge too long.
inline bool are_rows_dense(const Tiling& tiling, const LaneLimits& limits) {
  const Axis& inner = tiling.kept.inner();
  if (inner.size == 0 || inner.size > THREADS / 2) return false;
  const int64_t sharing = THREADS / inner.size, tiles = tiling.kept.count / inner.size;
  return tiling.reduced.axis[0].stride < 2 * inner.size * inner.stride && sharing * inner.size >= BUSY &&
         tiling.units() >= TURNS * limits.loads * sharing && tiles <= INT32_MAX &&
         limits.resident <= 2 * MERGED * sharing * tiles;
}

// Wide tiles read long stretches, narrow ones are many, and more threads share their rows. From the widest
// on, the first width counts with which blocks are many enough, or rows too few for narrower ones.
inline Tiling lane_tiling_of(Tiling tiling, const LaneLimits& limits) {
  constexpr int64_t LINE = 128, LONG = 4 * LINE;  // bytes of a tile's row
  if (are_rows_dense(tiling, limits)) {
    set_width(tiling, tiling.kept.inner().size);
    return tiling;
  }
  const int64_t narrowest = std::max(LINE / limits.bytes, int64_t{1});
  for (int64_t width = THREADS;; width /= 2) {
    set_width(tiling, width);
    if (width <= narrowest) return tiling;
    const int64_t sharing = tiling.sharing(), rounds = tiling.units() / (sharing * limits.loads);
    if (tiling.kept.count * sharing < tiling.tiles * BUSY) continue;  // too many are idle
    if (tiling.tiles >= WAVES * limits.resident) return tiling;
    if (rounds < (tiling.tiles >= limits.resident ? 2 * TURNS : 2)) return tiling;
    if (width * limits.bytes <= LONG && lane_parts_of(tiling, limits) <= MERGED / 2 * sharing) return tiling;
  }
}
