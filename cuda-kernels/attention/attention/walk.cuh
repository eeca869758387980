// The tiles of keys that a tile of queries needs.
#pragma once

#include "problem.h"

// In the order of visits: first the tiles that hide keys from some row, by the band or because they reach
// past the last key, then those that hide none.
struct Walk {
  int first, clean, clean_end;  // tiles: the first one, the first that hides none, the one behind these
  int masked, tiles;            // counts: of those that hide keys, and of all

  __device__ int operator[](int i) const {
    if (i >= masked) return clean + i - masked;
    return i < clean - first ? first + i : clean_end + i - (clean - first);
  }
};

// For the block_m queries from first_row on, in tiles of block_n keys. Lengths and band are those of a
// Problem or of one of its sequences.
template <typename Lengths>
__device__ inline Walk walk_of(const Lengths& problem, int first_row, int block_m, int block_n) {
  const int last_row = min(first_row + block_m, problem.Sq) - 1;
  const int low = max(first_row + problem.first, 0);  // the first key that some row sees, and the last one
  const int high = min(last_row + problem.last, problem.Sk - 1);
  const int all_low = max(last_row + problem.first, 0);  // those that all rows see
  const int all_high = min(first_row + problem.last, problem.Sk - 1);
  Walk walk;
  walk.first = low / block_n;
  const int end = low <= high ? high / block_n + 1 : walk.first;
  walk.clean = min(max((all_low + block_n - 1) / block_n, walk.first), end);
  walk.clean_end = min(max((all_high + 1) / block_n, walk.clean), end);
  walk.tiles = end - walk.first;
  walk.masked = walk.tiles - (walk.clean_end - walk.clean);
  return walk;
}
