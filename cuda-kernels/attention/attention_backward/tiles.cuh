// What the steps from v02 on have in common: what a block of keys, or of queries, needs of the others.
#pragma once

#include "problem.h"

// Neighbouring tiles of TILE_ROWS rows.
struct Tiles {
  int first, count;
};

__device__ inline Tiles tiles_of(int low, int high) {
  const int first = low / TILE_ROWS;
  return {first, low <= high ? high / TILE_ROWS + 1 - first : 0};
}

// Those of queries of which some see one of a block's keys.
__device__ inline Tiles queries_of(const BackwardProblem& problem, int first_key, int block_n) {
  const int last_key = min(first_key + block_n, problem.Sk) - 1;
  return tiles_of(max(first_key - problem.last, 0), min(last_key - problem.first, problem.Sq - 1));
}

// True if some of the TILE_ROWS queries does not see some of the TILE_ROWS keys.
__device__ inline bool hides(const BackwardProblem& problem, int first_row, int first_key) {
  const int last_row = min(first_row + TILE_ROWS, problem.Sq) - 1;
  const int last_key = first_key + TILE_ROWS - 1;
  return last_key >= problem.Sk || first_row + problem.last < last_key ||
         last_row + problem.first > first_key;
}

// Hides queries that do not see a key, and keys beyond the last one. `key` and `row` are those of the
// thread's first score.
__device__ inline void hide_columns(float (&scores)[TILE_ROWS / 2], const BackwardProblem& problem, int key,
                                    int row) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 2; ++i) {
    const int in_block = key + i % 4 / 2 * 8;
    const int low = in_block - problem.last - row;
    const int high = in_block < problem.Sk ? in_block - problem.first - row : -1;
    const int at = i / 4 * 8 + i % 2;
    if (at < low || at > high) scores[i] = problem.factor < 0 ? INFINITY : -INFINITY;
  }
}
