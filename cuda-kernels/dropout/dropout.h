// The parameters of a dropout mask, for the launchers of dropout_add and of its backward pass.
#pragma once

#include <cstdint>

// Element i of a matrix, counted row by row, is kept if its random word is at least `threshold`. Its word is
// number i % 4 of Philox block i / 4, see philox.h, whatever the strides and the launch are.
struct Dropout {
  uint32_t threshold;        // p * 2^32
  bool all;                  // p = 1: no word is large enough
  float scale;               // of what is kept
  uint64_t seed, offset;     // of the random words
  const int64_t* seed_at;    // where the GPU finds the seed instead, as under graph capture; or null
  const int64_t* offset_at;  // and what it adds to the offset; or null
  int64_t* used;             // [2], for the seed and the offset as the backward pass needs them; or null
};

// For p from 0 to 1.
inline Dropout dropout_of(double p) {
  Dropout dropout = {};
  dropout.all = p >= 1.0;
  dropout.threshold = dropout.all ? 0 : static_cast<uint32_t>(p * 4294967296.0);
  dropout.scale = dropout.all ? 0.0f : static_cast<float>(1.0 / (1.0 - p));
  return dropout;
}
