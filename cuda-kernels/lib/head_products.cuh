// Tiles of 64 rows of a head, as wgmma takes them, as it leaves their products, and as these are stored.
#pragma once

#include "head_tile.cuh"
#include "ptx/wgmma_registers.cuh"

constexpr int TILE_ROWS = 64;                      // those of one wgmma's first operand
constexpr int TILE_BYTES = TILE_ROWS * ROW_BYTES;  // of a panel, which is 64 columns of a tile

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

// Rounds pairs: where 16 columns of sums lie, wgmma expects its first operand.
template <typename T>
__device__ inline void round_to(uint32_t (&pairs)[TILE_ROWS / 16][4], const float (&values)[TILE_ROWS / 2]) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 2; i += 2)
    pairs[i / 8][i % 8 / 2] = rounded_pair<T>(values[i], values[i + 1]);
}

// Starts sums += a @ b for a tile a [TILE_ROWS, TILE_ROWS] in registers, as round_to has it, and a tile b
// [TILE_ROWS, WIDTH].
template <typename T, int WIDTH>
__device__ inline void multiply_from_registers(float (&sums)[WIDTH / 2],
                                               const uint32_t (&pairs)[TILE_ROWS / 16][4], uint64_t b) {
#pragma unroll
  for (int step = 0; step < TILE_ROWS / 16; ++step)
    wgmma_m64k16_registers<WIDTH, T, false>(sums, pairs[step], b + step * (16 * ROW_BYTES / 16), true);
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
