// How rows of a product of tiles leave: 16 bytes at a time, to rows of any stride.
#pragma once

#include "head_products.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The four lanes of a row transpose their words: lane i gets the words [i] of all four, in the lanes' order.
__device__ inline void transpose(uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int by = 1; by < 4; by *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & by) continue;
      const bool upper = lane & by;
      const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i + by], by);
      (upper ? words[i] : words[i + by]) = other;
    }
  }
}

// A warpgroup stores TILE_ROWS rows of N * 2 columns, multiplied by `scale`, one for each of a thread's two
// rows. `head` is the head's first row, and `pitch` elements lie between rows; `row` is the thread's first
// one. Rows from `rows` on do not exist, nor do columns from `columns` on.
template <typename T, int N>
__device__ inline void store_wide(T* head, int64_t pitch, const float (&sums)[N], const float (&scale)[2],
                                  int row, int rows, int columns) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int in_head = row + half * 8;
    T* line = head + in_head * pitch;
#pragma unroll
    for (int group = 0; group < N / 16; ++group) {  // of 32 columns
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* at = &sums[group * 16 + i * 4 + half * 2];
        words[i] = rounded_pair<T>(at[0] * scale[half], at[1] * scale[half]);
      }
      transpose(words);
      const int column = group * 32 + threadIdx.x % 4 * 8;
      if (in_head < rows && column < columns)
        *reinterpret_cast<uint4*>(line + column) = {words[0], words[1], words[2], words[3]};
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
