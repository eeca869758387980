// Sums of a gradient in global memory, to which blocks add, and what becomes of them.
#pragma once

#include "head_products.cuh"

// Sums are fp32 [heads, tiles of TILE_ROWS rows, WIDTH / 64, QUADS, WARPGROUP, 4]: in the order in which a
// warpgroup's threads hold a product [TILE_ROWS, 64], so that all of it is contiguous.
constexpr int PART = TILE_ROWS * 64;         // sums in a panel of 64 columns
constexpr int QUADS = PART / 4 / WARPGROUP;  // four neighbours in a thread's sums
constexpr int ROUNDING_THREADS = 256;

// A thread of a grid of ROUNDING_THREADS turns four sums of a problem's dq [heads, Sq, D] into numbers, two
// neighbours in each of two rows. A head has `padded` rows of sums, which are multiplied by `scale`.
template <typename T, int WIDTH, typename Problem>
__device__ inline void round_dq(const Problem& problem, const float4* sums) {
  const int64_t at = int64_t{blockIdx.x} * ROUNDING_THREADS + threadIdx.x;
  const int thread = at % WARPGROUP, quad = at / WARPGROUP % QUADS;
  const int panel = at / (WARPGROUP * QUADS) % (WIDTH / 64);
  const int64_t tile = at / (WARPGROUP * QUADS * (WIDTH / 64));  // over all heads
  const int tiles = problem.padded / TILE_ROWS;
  const int row = tile % tiles * TILE_ROWS + thread / 32 * 16 + thread % 32 / 4;
  const int column = panel * 64 + quad * 8 + thread % 4 * 2;
  if (column >= problem.D) return;
  const float4 found = sums[at];
  T* line = static_cast<T*>(problem.dq) + (tile / tiles * problem.Sq + row) * problem.D + column;
  if (row < problem.Sq)
    *reinterpret_cast<uint32_t*>(line) = rounded_pair<T>(found.x * problem.scale, found.y * problem.scale);
  if (row + 8 < problem.Sq)
    *reinterpret_cast<uint32_t*>(line + 8 * problem.D) =
        rounded_pair<T>(found.z * problem.scale, found.w * problem.scale);
}
