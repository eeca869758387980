// Loads of data that is read once, by packs or by single elements.
#pragma once

#include "access.h"
#include "common.cuh"

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

  // A predicate instead of a branch, because the compiler waits for loads before a branch. Evict-first (.cs),
  // since x is read once.
  __device__ void from(const T* place, bool wanted) {
    uint4& words = pack.words;
    words = make_uint4(0, 0, 0, 0);
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.b32 wanted, %5, 0;\n"
        "@wanted ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
        : "l"(place), "r"(static_cast<int>(wanted)));
  }
  __device__ T operator[](int i) const { return pack[i]; }
  template <typename Total>
  __device__ void all_to(Total& total, int64_t place, int64_t step) const {
    total.add(pack, place, step);
  }
};
