// Rows and columns of elements that are counted through the whole matrix.
#pragma once

#include <cstdint>

// An element's row and column.
struct Place {
  int64_t row, col;
};

// The place of element i in rows of N. It avoids the division of 64 bits, a hundred instructions, wherever 32
// bits are enough.
__device__ inline Place place_of(int64_t i, int64_t N) {
  if (i < N) return {0, i};
  if (i >> 32 == 0) {
    const uint32_t row = static_cast<uint32_t>(i) / static_cast<uint32_t>(N);  // N is no larger than i
    return {row, i - row * N};
  }
  const int64_t row = i / N;
  return {row, i - row * N};
}

__device__ inline Place next(Place place, int64_t N) {
  return place.col + 1 < N ? Place{place.row, place.col + 1} : Place{place.row + 1, 0};
}

// The place `rows` and `cols` further on; `cols` is less than N.
__device__ inline Place place_after(Place place, int64_t rows, int64_t cols, int64_t N) {
  place = {place.row + rows, place.col + cols};
  return place.col < N ? place : Place{place.row + 1, place.col - N};
}
