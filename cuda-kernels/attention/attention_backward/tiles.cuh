// What the steps from v02 on have in common: the queries that a block of keys needs, and tiles of scores.
#pragma once

#include "lib/activation.cuh"
#include "lib/ptx/wgmma.cuh"
#include "problem.h"

// The tiles of TILE_ROWS queries of which some see one of a block's keys.
struct QueryWalk {
  int first, tiles;
};

__device__ inline QueryWalk queries_of(const BackwardProblem& problem, int first_key, int block_n) {
  const int last_key = min(first_key + block_n, problem.Sk) - 1;
  const int low = max(first_key - problem.last, 0);  // the first query that sees one, and the last
  const int high = min(last_key - problem.first, problem.Sq - 1);
  const int first = low / TILE_ROWS;
  return {first, low <= high ? high / TILE_ROWS + 1 - first : 0};
}

// True if some of the TILE_ROWS queries does not see some of the TILE_ROWS keys.
__device__ inline bool hides(const BackwardProblem& problem, int first_row, int first_key) {
  const int last_row = min(first_row + TILE_ROWS, problem.Sq) - 1;
  const int last_key = first_key + TILE_ROWS - 1;
  return last_key >= problem.Sk || first_row + problem.last < last_key ||
         last_row + problem.first > first_key;
}

// Two values rounded to T, in one register.
template <typename T>
__device__ inline uint32_t rounded_pair(float low, float high) {
  alignas(4) const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  return *reinterpret_cast<const uint32_t*>(pair);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Starts sums = a @ b^T for tiles [TILE_ROWS, WIDTH].
template <typename T, int WIDTH>
__device__ inline void multiply_rows(float (&sums)[TILE_ROWS / 2], uint64_t a, uint64_t b) {
#pragma unroll
  for (int step = 0; step < WIDTH / 16; ++step) {
    const int at = step / 4 * (TILE_BYTES / 16) + step % 4 * 2;  // 16 columns, in units of 16 bytes
    wgmma_m64k16<TILE_ROWS, T, false, true>(sums, a + at, b + at, step > 0);
  }
}

// Starts sums += a^T @ b for a tile of pairs a [queries, keys] and a tile b [queries, WIDTH].
template <typename T, int WIDTH>
__device__ inline void multiply_columns(float (&sums)[WIDTH / 2], uint64_t a, uint64_t b) {
#pragma unroll
  for (int step = 0; step < TILE_ROWS / 16; ++step) {
    const int at = step * (16 * ROW_BYTES / 16);
    wgmma_m64k16<WIDTH, T, true, false>(sums, a + at, b + at, true);
  }
}

// Hides keys outside the band, and beyond the last one. `row` and `key` are those of the thread's first
// score.
__device__ inline void hide(float (&scores)[TILE_ROWS / 2], const BackwardProblem& problem, int row,
                            int key) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 2; ++i) {
    const int in_row = row + i % 4 / 2 * 8;
    const int low = in_row + problem.first - key;
    const int high = min(in_row + problem.last, problem.Sk - 1) - key;
    const int at = i / 4 * 8 + i % 2;
    if (at < low || at > high) scores[i] = problem.factor < 0 ? INFINITY : -INFINITY;
  }
}

// Turns scores into p, and dp, the products of dout and v, into ds. lse and delta are those of the thread's
// rows.
__device__ inline void differentiate(float (&scores)[TILE_ROWS / 2], float (&dp)[TILE_ROWS / 2],
                                     const float (&lse)[2], const float (&delta)[2], float factor) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 2; ++i) {
    scores[i] = exp2_approx(fmaf(scores[i], factor, -lse[i % 4 / 2]));
    dp[i] = scores[i] * (dp[i] - delta[i % 4 / 2]);
  }
}

// A warpgroup rounds a tile of pairs to T and stores it as TMA would, swizzled: 16-byte pieces of a row of
// 128 bytes are XORed with the row, so that neither rows nor columns meet in a bank.
template <typename T>
__device__ inline void store_pairs(uint8_t (&tile)[TILE_BYTES], const float (&values)[TILE_ROWS / 2]) {
  const int thread = threadIdx.x % WARPGROUP, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 2; i += 2) {
    const int piece = i / 4 ^ row % 8;
    uint8_t* at = tile + (row + i % 4 / 2 * 8) * ROW_BYTES + piece * 16 + thread % 4 * 4;
    *reinterpret_cast<uint32_t*>(at) = rounded_pair<T>(values[i], values[i + 1]);
  }
}

// A warpgroup stores TILE_ROWS rows of a gradient, multiplied by `scale`. `place` is the head's first row
// among those of all heads, `row` the thread's first one within the head, which has `rows`.
template <typename T, int WIDTH>
__device__ inline void store_rows(void* gradient, const float (&sums)[WIDTH / 2], float scale, int64_t place,
                                  int row, int rows, int D) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int in_head = row + half * 8;
    if (in_head >= rows) continue;
    T* line = static_cast<T*>(gradient) + (place + in_head) * D + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
      const float* at = &sums[j * 4 + half * 2];
      if (j * 8 < D)
        *reinterpret_cast<uint32_t*>(line + j * 8) = rounded_pair<T>(at[0] * scale, at[1] * scale);
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
