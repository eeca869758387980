// What limits a launch for the heads of a tensor [B, heads, S, D].
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

// Throws std::runtime_error if heads are wider than a kernel's tiles. `instead` is a step that takes them.
inline void require_narrow_heads(int64_t D, int64_t widest, const char* instead) {
  if (D > widest) {
    throw std::runtime_error("D is " + std::to_string(D) + ", must be at most " + std::to_string(widest) +
                             ": take " + instead);
  }
}

// Blocks of a grid with one for each of a head's tiles of rows; `heads` are those of all batches. The grid is
// flat, since its y and z would end at 65535. Throws std::runtime_error from 2^31 blocks on.
inline unsigned blocks_of(int64_t heads, int64_t S, int64_t tiles) {
  const int64_t blocks = heads * tiles;
  if (blocks >= int64_t{1} << 31) {
    throw std::runtime_error(std::to_string(heads) + " heads of " + std::to_string(S) + " rows take " +
                             std::to_string(blocks) + " blocks, a grid has fewer than 2^31: split the batch");
  }
  return static_cast<unsigned>(blocks);
}
