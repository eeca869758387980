// Rows of heads, read by threads, however they are aligned.
#pragma once

#include "head_strides.h"
#include "values.cuh"

// Whether every row of heads of 16-bit elements can be read 16 bytes at a time.
inline bool rows_are_aligned(const void* heads, const HeadStrides& stride) {
  return aligned_to_16_bytes(heads) && stride.batch % 8 == 0 && stride.head % 8 == 0 && stride.row % 8 == 0;
}

// 16 bytes of a row. WIDE: they are aligned, and read by one access.
template <bool WIDE, typename T>
__device__ inline Pack<T> piece_at(const T* from) {
  Pack<T> piece;
  if constexpr (WIDE) {
    piece = *reinterpret_cast<const Pack<T>*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < Pack<T>::SIZE; ++i) reinterpret_cast<T*>(&piece.words)[i] = from[i];
  }
  return piece;
}
