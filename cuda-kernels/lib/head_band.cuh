// What a band of keys hides, and which tiles of queries need a tile of keys. Query i sees the keys from i +
// first to i + last; lengths and limits, Sq, Sk, first and last, are a problem's, or those of one of its
// sequences.
#pragma once

#include <algorithm>
#include <cstdint>

#include "head_products.cuh"

// Neighbouring tiles of rows.
struct Tiles {
  int first, count;
};

__device__ inline Tiles tiles_of(int low, int high, int rows = TILE_ROWS) {
  const int first = low / rows;
  return {first, low <= high ? high / rows + 1 - first : 0};
}

// Tiles of `rows` queries of which some see one of a block's keys.
template <typename Lengths>
__device__ inline Tiles queries_of(const Lengths& of, int first_key, int block_n, int rows = TILE_ROWS) {
  const int last_key = min(first_key + block_n, of.Sk) - 1;
  return tiles_of(max(first_key - of.last, 0), min(last_key - of.first, of.Sq - 1), rows);
}

// True if some of the TILE_ROWS queries does not see some of the TILE_ROWS keys.
template <typename Lengths>
__device__ inline bool hides(const Lengths& of, int first_row, int first_key) {
  const int last_row = min(first_row + TILE_ROWS, of.Sq) - 1;
  const int last_key = first_key + TILE_ROWS - 1;
  return last_key >= of.Sk || first_row + of.last < last_key || last_row + of.first > first_key;
}

// Sets pairs of a query that does not see a key, and of keys beyond the last one, to `hidden`. `key` and
// `row` are those of the thread's first pair.
template <int N, typename Lengths>
__device__ inline void hide_pairs(float (&pairs)[N], const Lengths& of, float hidden, int key, int row) {
  const int Sk = of.Sk, first = of.first, last = of.last;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int in_block = key + i % 4 / 2 * 8;
    const int low = in_block - last - row;
    const int high = in_block < Sk ? in_block - first - row : -1;
    const int at = i / 4 * 8 + i % 2;
    if (at < low || at > high) pairs[i] = hidden;
  }
}

// The same for scores, of which the problem's factor makes powers of 2.
template <int N, typename Lengths>
__device__ inline void hide_columns(float (&scores)[N], const Lengths& of, int key, int row) {
  hide_pairs(scores, of, of.factor < 0 ? INFINITY : -INFINITY, key, row);
}

// How many queries see a key.
template <typename Lengths>
int64_t queries_of_key(const Lengths& of, int64_t key) {
  const int64_t low = std::max<int64_t>(key - of.last, 0);
  return std::max<int64_t>(std::min<int64_t>(key - of.first, of.Sq - 1) - low + 1, 0);
}
