// How a thread of a maximum's gradient loads elements of x and stores those of dx.
#pragma once

#include <type_traits>

#include "shifted_access.cuh"

enum class Moves {
  ELEMENTS,       // one element
  PACKS,          // packs of 16 bytes, all of them whole and aligned
  SHIFTED_LOADS,  // packs that are aligned in dx alone; the last one of a run may be ragged
  SHIFTED,        // packs that start anywhere in both
};

template <typename T, Moves MOVES>
constexpr int WIDTH_OF = MOVES == Moves::ELEMENTS ? 1 : Pack<T>::SIZE;

template <typename T>
struct Element {
  T value;
  __device__ T operator[](int) const { return value; }
};
template <typename T>
__device__ void set(Element<T>& element, int, T value) {
  element.value = value;
}
// What one access moves.
template <typename T, Moves MOVES>
using Moved = std::conditional_t<MOVES == Moves::ELEMENTS, Element<T>, Pack<T>>;

// A load in flight, of which `count` elements are wanted; others are undefined. x's memory ends at `end`.
template <typename T, Moves MOVES>
struct InFlight : ShiftedLoad<T> {};
template <typename T>
struct InFlight<T, Moves::ELEMENTS> {
  Element<T> element;

  __device__ void from(const T* place, bool wanted, const T*, const T*) {
    element.value = from_float<T>(0.0f);
    if (wanted) element.value = *place;
  }
  __device__ Element<T> taken(int) const { return element; }
};
template <typename T>
struct InFlight<T, Moves::PACKS> {
  Pack<T> pack;

  __device__ void from(const T* place, bool wanted, const T*, const T*) {
    pack.words = make_uint4(0, 0, 0, 0);
    load_if<Reading::USUAL>(wanted, place, pack.words);
  }
  __device__ Pack<T> taken(int) const { return pack; }
};

// Stores the first `count` elements. All lanes of a warp call it.
template <Moves MOVES, typename T>
__device__ void store_moved(T* place, int count, const Moved<T, MOVES>& moved) {
  if constexpr (MOVES == Moves::ELEMENTS) {
    if (count > 0) *place = moved.value;
  } else if constexpr (MOVES == Moves::SHIFTED) {
    store_anywhere(place, count, moved);
  } else {
    if (count == Pack<T>::SIZE) {
      __stcs(reinterpret_cast<uint4*>(place), moved.words);
    } else if (MOVES == Moves::SHIFTED_LOADS) {
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) {
        if (j < count) place[j] = moved[j];
      }
    }
  }
}
