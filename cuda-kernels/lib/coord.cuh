// Rows and columns of elements that are counted through the whole matrix.
#pragma once

#include <cstdint>

// An element's coordinates.
struct Coord {
  int64_t row, col;
};

// The coordinates of element i in rows of N. It avoids the division of 64 bits, a hundred instructions,
// wherever 32 bits are enough.
__device__ inline Coord coord_of(int64_t i, int64_t N) {
  if (i < N) return {0, i};
  if (i >> 32 == 0) {
    const uint32_t row = static_cast<uint32_t>(i) / static_cast<uint32_t>(N);  // N is no larger than i
    return {row, i - row * N};
  }
  const int64_t row = i / N;
  return {row, i - row * N};
}

__device__ inline Coord next(Coord coord, int64_t N) {
  return coord.col + 1 < N ? Coord{coord.row, coord.col + 1} : Coord{coord.row + 1, 0};
}

// `rows` and `cols` further on; `cols` is less than N.
__device__ inline Coord coord_after(Coord coord, int64_t rows, int64_t cols, int64_t N) {
  coord = {coord.row + rows, coord.col + cols};
  return coord.col < N ? coord : Coord{coord.row + 1, coord.col - N};
}
