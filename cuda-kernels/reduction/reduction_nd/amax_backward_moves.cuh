// How a thread of a maximum's gradient loads elements of x and stores those of dx.
#pragma once

#include <type_traits>

#include "shifted_access.cuh"

enum class Moves {
  ELEMENTS,       // one element
  PACKS,          // packs of 16 bytes, all of them whole and aligned
  SHIFTED_LOADS,  // packs that are aligned in dx alone; those at the ends of a run may be ragged
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

// Elements [low, high) of the pack that begins at in_x in x and at in_dx in dx; none if high is 0. Both share
// a register.
class Unit {
 public:
  int64_t in_x, in_dx;

  __device__ int low() const { return span_ % 16; }
  __device__ int high() const { return span_ / 16; }
  __device__ bool is_empty() const { return span_ == 0; }
  __device__ void set_span(int low, int high) { span_ = low + 16 * high; }

 private:
  unsigned span_ = 0;
};

// NaNs of any dtype, which equal nothing.
__device__ inline uint4 nans() { return make_uint4(~0u, ~0u, ~0u, ~0u); }

// A load in flight. Elements that the unit lacks are undefined, but NaN if it has none. x is [begin, end).
template <typename T, Moves MOVES>
struct InFlight {
  const T* place;
  uint4 low, high;
  bool all;  // the aligned words lie within x

  __device__ void from(const T* begin, const T* end, const Unit& unit) {
    place = begin + unit.in_x;
    const int skew = skew_of(place);
    const T* const words = place - skew;
    all = words >= begin && words + (skew > 0 ? 2 : 1) * Pack<T>::SIZE <= end;
    low = high = nans();
    load_if<Reading::USUAL>(!unit.is_empty() && all, words, low);
    load_if<Reading::USUAL>(!unit.is_empty() && all && skew > 0, words + Pack<T>::SIZE, high);
  }
  __device__ Pack<T> taken(const Unit& unit) const {
    Pack<T> pack = put_together<T>(low, high, skew_of(place));
    if (all || unit.is_empty()) return pack;
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) {
      if (j >= unit.low() && j < unit.high()) set(pack, j, place[j]);
    }
    return pack;
  }
};
template <typename T>
struct InFlight<T, Moves::ELEMENTS> {
  Element<T> element;

  __device__ void from(const T* begin, const T*, const Unit& unit) {
    element.value = from_float<T>(NAN);
    if (!unit.is_empty()) element.value = begin[unit.in_x];
  }
  __device__ Element<T> taken(const Unit&) const { return element; }
};
template <typename T>
struct InFlight<T, Moves::PACKS> {
  Pack<T> pack;

  __device__ void from(const T* begin, const T*, const Unit& unit) {
    pack.words = nans();
    load_if(!unit.is_empty(), begin + unit.in_x, pack.words);
  }
  __device__ Pack<T> taken(const Unit&) const { return pack; }
};

// Loads in flight of whole packs of a run, whose aligned words all lie within x. They start anywhere within
// 16 bytes, and lie a multiple of 16 bytes apart.
template <typename T, int COUNT>
struct InsideLoads {
  uint4 low[COUNT], high[COUNT];
  int skew;

  __device__ void from(const T* first, int apart) {
    skew = skew_of(first);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const auto* const words = reinterpret_cast<const uint4*>(first - skew + k * apart);
      low[k] = high[k] = words[0];
      if (skew > 0) high[k] = words[1];
    }
  }
  __device__ Pack<T> taken(int k) const {
    return skew == 0 ? Pack<T>{low[k]} : put_together<T>(low[k], high[k], skew);
  }
};

// Stores a unit's elements of a pack. All lanes of a warp call it.
template <Moves MOVES, typename T>
__device__ void store_moved(T* dx, const Unit& unit, const Moved<T, MOVES>& moved, Overlap overlap,
                            bool continues) {
  T* const place = dx + unit.in_dx;
  if constexpr (MOVES == Moves::ELEMENTS) {
    if (!unit.is_empty()) *place = moved.value;
  } else if constexpr (MOVES == Moves::SHIFTED) {
    store_anywhere(place, unit.high(), moved, overlap, continues);
  } else {
    if (unit.high() - unit.low() == Pack<T>::SIZE) {
      __stcs(reinterpret_cast<uint4*>(place), moved.words);
    } else if (MOVES == Moves::SHIFTED_LOADS) {
      store_ragged(place, unit.low(), unit.high(), moved);
    }
  }
}
