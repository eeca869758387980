// For kernels whose threads keep their columns from row to row: in rows that are not whole packs, a thread's
// elements begin anywhere in a Philox block.
#pragma once

#include "args.h"
#include "dropout/mask.cuh"
#include "lib/access.h"
#include "lib/packs.cuh"

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

// Whether dout and x have the skew of dx in every row, so that a pack of one is a pack of all.
template <typename T>
bool are_skewed_alike(const DropoutAddBackwardArgs& args) {
  const auto like_dx = [&](int64_t stride) { return args.M == 1 || (stride - args.N) % Pack<T>::SIZE == 0; };
  return aligned_to_16_bytes(args.dout, args.x, args.dx) && like_dx(args.stride_dm) &&
         (args.x == nullptr || like_dx(args.stride_xm));
}
