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

// Those of keys of which some are seen by one of a block's queries.
__device__ inline Tiles keys_of(const BackwardProblem& problem, int first_row, int block_m) {
  const int last_row = min(first_row + block_m, problem.Sq) - 1;
  return tiles_of(max(first_row + problem.first, 0), min(last_row + problem.last, problem.Sk - 1));
}

// True if some of the TILE_ROWS queries does not see some of the TILE_ROWS keys.
__device__ inline bool hides(const BackwardProblem& problem, int first_row, int first_key) {
  const int last_row = min(first_row + TILE_ROWS, problem.Sq) - 1;
  const int last_key = first_key + TILE_ROWS - 1;
  return last_key >= problem.Sk || first_row + problem.last < last_key ||
         last_row + problem.first > first_key;
}
