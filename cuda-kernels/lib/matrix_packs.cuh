// Packs that are counted through all rows of a matrix. Terms: docs/glossary.md.
#pragma once

#include "access.h"
#include "packs.cuh"
#include "places.cuh"

// Loads up to `count` elements of a pack, one by one, from `place` on; past the end of a row it continues
// in the next one. A bias is a matrix whose rows lie 0 apart.
template <typename T>
__device__ Pack<T> load_elements(const void* matrix, int64_t stride, Place place, int64_t N, int count) {
  Pack<T> pack = {};
#pragma unroll
  for (int j = 0; j < Pack<T>::SIZE; ++j, place = next(place, N)) {
    if (j < count) set(pack, j, static_cast<const T*>(matrix)[place.row * stride + place.col]);
  }
  return pack;
}

template <typename T>
__device__ const uint4* pack_at(const void* matrix, int64_t stride, Place place) {
  return reinterpret_cast<const uint4*>(static_cast<const T*>(matrix) + place.row * stride + place.col);
}
