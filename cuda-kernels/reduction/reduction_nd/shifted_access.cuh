// Packs at any place within 16 bytes: a load shifts two aligned words together, a store shifts the packs of
// neighbouring lanes. Terms: docs/glossary.md.
#pragma once

#include "lib/shifted_packs.cuh"

// A pack from any place on. `all`: whether its aligned words lie within x.
template <typename T>
struct ShiftedLoad {
  const T* place;
  uint4 low, high;
  bool all;

  __device__ void from(const T* from, bool wanted, const T* begin, const T* end) {
    const int skew = skew_of(from);
    const T* const words = from - skew;
    place = from;
    all = words >= begin && words + (skew > 0 ? 2 : 1) * Pack<T>::SIZE <= end;
    low = high = make_uint4(0, 0, 0, 0);
    load_if<Reading::USUAL>(wanted && all, words, low);
    load_if<Reading::USUAL>(wanted && all && skew > 0, words + Pack<T>::SIZE, high);
  }
  // The first `count` elements; others are undefined.
  __device__ Pack<T> taken(int count) const {
    return all ? put_together<T>(low, high, skew_of(place)) : load_ragged(place, 0, count, 0.0f);
  }
};

// Stores the first `count` elements of each lane's pack at `place`, which may be anywhere. Where the next
// lane's pack continues this one in memory, the aligned 16 bytes that begin in one and end in the other are
// put together from both; what no such 16 bytes hold is stored element by element. All lanes of a warp call
// it.
template <typename T>
__device__ void store_anywhere(T* place, int count, Pack<T> pack) {
  constexpr int SIZE = Pack<T>::SIZE;
  const int lane = threadIdx.x % 32, ahead = (SIZE - skew_of(place)) % SIZE;
  const auto from_next = [](auto value) { return __shfl_down_sync(~0u, value, 1); };
  const uint4 mine = pack.words;
  const uint4 next = make_uint4(from_next(mine.x), from_next(mine.y), from_next(mine.z), from_next(mine.w));
  const auto address = reinterpret_cast<unsigned long long>(place);
  const unsigned long long next_address = from_next(address);
  const int next_count = from_next(count);
  const bool follows = lane < 31 && count == SIZE && next_address == address + sizeof(Pack<T>);
  const bool takes = count > 0 && ahead + SIZE <= count + (follows ? next_count : 0);
  const bool given = __shfl_up_sync(~0u, static_cast<int>(takes && follows), 1) && lane > 0;
  if (takes) __stcs(reinterpret_cast<uint4*>(place + ahead), put_together<T>(mine, next, ahead).words);
#pragma unroll
  for (int j = 0; j < SIZE; ++j) {
    if (!(j < ahead ? given : takes) && j < count) place[j] = pack[j];
  }
}
