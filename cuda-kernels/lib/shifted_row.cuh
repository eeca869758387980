// Short rows in lanes of a warp, in whole packs that start anywhere within 16 bytes: used by softmax's v13,
// by layer_norm's v12 and rms_norm's v07. Terms: docs/glossary.md.
#pragma once

#include "held.cuh"

// Where a row of n elements, whole packs of out, lies in an input: its packs begin `shift` elements behind a
// multiple of 16 bytes, and are shifted together from two aligned words. The first word of the first row may
// begin before the matrix, within the 16 bytes of its first element. The second word of the row's last pack
// may reach beyond the matrix; that pack is then loaded element by element. `fill` stands behind the row.
template <typename T, int LANES, int PACKS>
struct ShiftedRow {
  static constexpr int SIZE = Pack<T>::SIZE, STEP = LANES * SIZE;
  const T* row;
  float fill;
  int n, shift, wide, first;  // wide: elements of the packs whose words lie within the matrix

  // `behind`: elements of the matrix behind the row.
  __device__ ShiftedRow(const T* row, int64_t n, int64_t behind, float fill)
      : row(row),
        fill(fill),
        n(static_cast<int>(n)),
        shift(skew_of(row)),
        wide(static_cast<int>(n) - (behind < reach_of<T>(shift) ? SIZE : 0)),
        first(threadIdx.x % LANES * SIZE) {}

  // Issues the loads of this lane's packs.
  __device__ void load(Pack<T> (&packs)[PACKS]) const {
    load_shifted<STEP>(packs, row + first, shift, fill, [this](int i) { return first + i * STEP < wide; });
  }
  __device__ void finish_load(Pack<T> (&packs)[PACKS]) const {
    if (wide >= n) return;
    const Pack<T> last = load_ragged(row, wide, n, fill);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (first + i * STEP == wide) packs[i] = last;
    }
  }
};
