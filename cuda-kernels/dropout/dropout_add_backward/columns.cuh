// For kernels whose threads keep their columns from row to row: in rows that are not whole packs, a thread's
// elements begin anywhere in a Philox block.
#pragma once

#include "dropout/mask.cuh"
#include "lib/access.h"

// Which of COUNT elements from any i on are kept, at the price of one more Philox call.
template <int COUNT>
__device__ void keeps_anywhere(const Mask& mask, bool (&kept)[COUNT], int64_t i) {
  bool around[COUNT + 4];
  mask.keeps(around, i / 4 * 4);
  uint32_t bits = 0;  // an array cannot be shifted by a runtime number in registers
#pragma unroll
  for (int j = 0; j < COUNT + 4; ++j) bits |= static_cast<uint32_t>(around[j]) << j;
  bits >>= i % 4;
#pragma unroll
  for (int j = 0; j < COUNT; ++j) kept[j] = bits >> j & 1;
}
