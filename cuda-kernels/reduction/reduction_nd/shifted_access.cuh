// Packs at any place within 16 bytes: a load shifts two aligned words together, a store shifts the packs of
// neighbouring lanes. Terms: docs/glossary.md.
#pragma once

#include "lib/load_if.cuh"
#include "lib/packs.cuh"

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

// Stores the elements [low, high) of a pack one by one.
template <typename T>
__device__ void store_ragged(T* place, int low, int high, const Pack<T>& pack) {
#pragma unroll
  for (int j = 0; j < Pack<T>::SIZE; ++j) {
    if (j >= low && j < high) place[j] = pack[j];
  }
}

// Whether a warp's last lane repeats the first pack of the next warp. It stores nothing, but the lane before
// it then has both packs of its aligned 16 bytes.
enum class Overlap { NONE, LAST_LANE };

// Stores the first `count` elements of each lane's pack at `place`, which may be anywhere. Where the next
// lane's pack continues this one in memory, the aligned 16 bytes that begin in one and end in the other are
// put together from both; what no such 16 bytes hold is stored element by element. `continues`: the pack of
// lane 0 continues one of the warp before, which overlaps. All lanes of a warp call it.
template <typename T>
__device__ void store_anywhere(T* place, int count, const Pack<T>& pack, Overlap overlap = Overlap::NONE,
                               bool continues = false) {
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
  const bool before = __shfl_up_sync(~0u, static_cast<int>(takes && follows), 1);
  const bool given = lane > 0 ? before : continues && ahead <= count;
  if (overlap == Overlap::LAST_LANE && lane == 31) return;
  if (takes) __stcs(reinterpret_cast<uint4*>(place + ahead), put_together<T>(mine, next, ahead).words);
  // Its elements before and behind the aligned 16 bytes.
  if (!given) store_ragged(place, 0, min(ahead, count), pack);
  if (!takes) store_ragged(place, ahead, count, pack);
}
