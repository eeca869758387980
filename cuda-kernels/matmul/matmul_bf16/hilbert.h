// An order of tiles along a Hilbert curve. Cerveny, "gilbert: space-filling curve for rectangular domains of
// arbitrary size" (2018), written as a loop that follows one tile.
#pragma once

#include <cuda_runtime_api.h>

struct Cell {
  int row, col;
};

// The cell of a grid that the curve visits after `left` others. It visits each cell once, and steps to a
// neighbour (seldom a diagonal one), so any stretch of it covers a compact patch.
__host__ __device__ inline Cell hilbert_cell(int rows, int cols, int left) {
  // The stretch that the cell is in covers a x b cells from (u, v) on, with its ends at the two ends of a.
  // Both are negative where it runs backwards. u counts rows or else columns, v the others.
  bool along_rows = rows > cols;
  int a = along_rows ? rows : cols;
  int b = along_rows ? cols : rows;
  int u = 0;
  int v = 0;
  const auto size = [](int extent) { return extent < 0 ? -extent : extent; };
  const auto step = [](int extent) { return extent < 0 ? -1 : 1; };
  while (size(a) > 1 && size(b) > 1) {
    // Halves are made even where they can be, so that a stretch ends beside where the next one begins.
    int half_a = a / 2;
    int half_b = b / 2;
    if (2 * size(a) > 3 * size(b)) {  // long: one half behind the other
      half_a += half_a % 2;
      const int first = size(half_a * b);
      if (left < first) {
        a = half_a;
      } else {
        left -= first;
        u += half_a;
        a -= half_a;
      }
      continue;
    }
    if (size(b) > 2) half_b += half_b % 2;
    const int out = size(half_a * half_b);
    const int along = size(a * (b - half_b));
    if (out <= left && left < out + along) {
      left -= out;
      v += half_b;
      b -= half_b;
      continue;
    }
    // Out along b and, behind the stretch along a, back again: u and v change places.
    const bool back = left >= out;
    const int begin_u = back ? u + a - step(a) : u;
    const int begin_v = back ? v + half_b - step(b) : v;
    if (back) left -= out + along;
    u = begin_v;
    v = begin_u;
    b = back ? half_a - a : half_a;
    a = back ? -half_b : half_b;
    along_rows = !along_rows;
  }
  if (size(b) == 1) {
    u += left * step(a);
  } else {
    v += left * step(b);
  }
  return along_rows ? Cell{u, v} : Cell{v, u};
}
