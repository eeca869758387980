// Sequences of different lengths in one tensor, one behind the other, as their starts tell.
#pragma once

#include "common.cuh"

// Sequence n has the tokens starts[n] to starts[n + 1] - 1.
//
// Tiles of tokens are numbered without a pass over the lengths: the tiles of sequence n begin at slot
// starts[n] / block + n. The next sequence's begin behind the last of these, since a division rounds away
// less than one tile; so some slots have no tile.
struct PackedSequences {
  const int* starts;  // [count + 1], on the GPU
  int count;

  __device__ int first_slot(int n, int block) const { return starts[n] / block + n; }

  // The sequence of a slot: the last one whose slots begin at or before it.
  __device__ int sequence_of(int slot, int block) const {
    int low = 0, high = count;  // it is at least low and below high
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_slot(middle, block) <= slot ? low : high) = middle;
    }
    return low;
  }
};

// Slots of all sequences together, which have `tokens` tokens.
inline int64_t slots_of(int64_t tokens, int count, int block) { return tokens / block + count; }
