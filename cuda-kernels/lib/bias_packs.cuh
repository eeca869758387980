// Packs of a bias, for packs that are counted through all rows of a matrix. Terms: docs/glossary.md.
#pragma once

#include "matrix_packs.cuh"
#include "waits.cuh"

// Loads a pack of the bias from each column on; past the last column a pack continues with column 0. The bias
// has at least a pack of elements. If its packs are not aligned, single elements of all packs are under way
// before one is waited for, and a pack in which a row ends, which is rare, is loaded again. Wide loads come
// last: loads of single elements write to the same registers, and would wait for them and for all loads
// before.
template <typename T, int PACKS>
__device__ void load_bias_packs(Pack<T> (&packs)[PACKS], const void* bias, bool wide,
                                const Place (&places)[PACKS], int64_t N, uint32_t zero) {
  constexpr int SIZE = Pack<T>::SIZE;
  const T* elements = static_cast<const T*>(bias);
  if (!wide) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      packs[i] = load_ragged(elements + min(places[i].col, N - SIZE), 0, SIZE, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (places[i].col + SIZE > N) packs[i] = load_elements<T>(bias, 0, {0, places[i].col}, N, SIZE);
      // Waits here: else the wide loads below would wait, whether their predicate is true or not.
      if (sizeof(T) == 4) add_nothing(packs[i], zero);
    }
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    load_if<Reading::AGAIN>(wide, elements + places[i].col, packs[i].words);
  }
}
