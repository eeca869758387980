// Loads of data that is read once, by packs or by single elements.
#pragma once

#include "access.h"
#include "common.cuh"
#include "load_if.cuh"

// One load of a thread: a pack, or a single element if the axes do not allow packs.
template <typename T, Access ACCESS>
struct Load;
template <typename T>
struct Load<T, Access::ELEMENTS> {
  static constexpr int WIDTH = 1;
  T value;

  __device__ void from(const T* place, bool wanted) {
    value = from_float<T>(0.0f);
    if (wanted) value = *place;
  }
  __device__ T operator[](int) const { return value; }
  template <typename Total>
  __device__ void all_to(Total& total, int64_t place, int64_t) const {
    total.add(value, place);
  }
};
template <typename T>
struct Load<T, Access::PACKS> {
  static constexpr int WIDTH = Pack<T>::SIZE;
  Pack<T> pack;

  __device__ void from(const T* place, bool wanted) {
    pack.words = make_uint4(0, 0, 0, 0);
    load_if(wanted, place, pack.words);
  }
  __device__ T operator[](int i) const { return pack[i]; }
  template <typename Total>
  __device__ void all_to(Total& total, int64_t place, int64_t step) const {
    total.add(pack, place, step);
  }
};
