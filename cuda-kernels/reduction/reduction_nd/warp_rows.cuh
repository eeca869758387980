// Many outputs of v06, each of some thousand whole packs, for argmax of 32 to 8,192: a warp an output, and
// nothing is merged between warps. Terms: docs/glossary.md.
#pragma once

#include <climits>

#include "lib/load.cuh"
#include "tiling.cuh"

constexpr int ROW_LOADS = 2 * LOADS, ROW_RESIDENT = 3;

// A block needs a last round of loads, which may be nearly empty, and a barrier for every output; warps need
// neither, but the last ones end alone. So they suit outputs that are many, and too short for a block to be
// long at work. All runs must be whole packs, and lie along one axis. Argmax takes one run; v05 searches a
// pack each time a lane's maximum grows.
template <typename T, typename Total>
bool are_rows_by_warp(const Tiling& tiling, int64_t sms) {
  constexpr int64_t WAVES_OF_WARPS = 4, ROUNDS_OF_BLOCK = 4;
  constexpr bool IS_ARGMAX = std::is_same_v<Total, ArgMax>;
  const bool whole = tiling.wide && tiling.tail == 0 && tiling.run % Pack<T>::SIZE == 0 &&
                     tiling.reduced.inner().size == tiling.run / Pack<T>::SIZE;
  const bool walked = tiling.reduced.rank <= (IS_ARGMAX ? 1 : 2) && tiling.reduced.inner().size >= 32;
  return tiling.columns == 0 && whole && walked && (IS_ARGMAX || tiling.lanes == THREADS) &&
         tiling.kept.count >= WAVES_OF_WARPS * sms * ROW_RESIDENT * (THREADS / 32) &&
         tiling.units() <= ROUNDS_OF_BLOCK * THREADS * ROW_LOADS &&
         cdiv(tiling.kept.count, THREADS / 32) <= INT_MAX;
}

template <typename T, typename Total>
__device__ void reduce_rows_by_warp(const T* x, void* out, const Tiling& tiling, float divisor) {
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / 32;
  if (output >= tiling.kept.count) return;  // as do all lanes of the warp
  const Offsets place = place_of(tiling.kept, output);
  const Axis& inner = tiling.reduced.axis[tiling.reduced.rank - 1];
  const int units = static_cast<int>(tiling.reduced.count), run = static_cast<int>(inner.size);
  // From behind a run to the next one.
  const int64_t gap = tiling.reduced.axis[0].stride - tiling.run;
  const int lane = threadIdx.x % 32;
  const T* at = x + place.offset + lane * Pack<T>::SIZE;
  int left = run - lane;  // packs of the run from `at` on
  Total total = Total::none();
#pragma unroll 1
  for (int unit = lane; unit < units; unit += 32 * ROW_LOADS) {
    Load<T, Access::PACKS> loads[ROW_LOADS];
#pragma unroll
    for (int i = 0; i < ROW_LOADS; ++i) {
      loads[i].from(at, unit + 32 * i < units);
      left -= 32;
      at += 32 * Pack<T>::SIZE + (left > 0 ? 0 : gap);
      left += left > 0 ? 0 : run;
    }
#pragma unroll
    for (int i = 0; i < ROW_LOADS; ++i) {
      if (unit + 32 * i < units) total.add(loads[i].pack, 0, 0);
    }
  }
  total = merge_lanes(total, 32);
  if (lane == 0) store<T>(total, out, place.step, divisor);
}

// The first of an output's packs that has its maximum, or NaN. Packs come in order, and only the first one
// with a larger element is kept; which of its elements that is, is searched once, in the last one kept.
struct LargestPack {
  float value = -INFINITY;
  int unit = INT_MAX;  // if nothing is above -inf

  template <typename T>
  __device__ void add(const Pack<T>& pack, int at) {
    const float most = largest(pack);
    // No && here: it would be a branch for every pack.
    const bool wins = static_cast<int>(!(most <= value)) & static_cast<int>(!isnan(value));
    value = wins ? most : value;
    unit = wins ? at : unit;
  }
  __device__ void merge(const LargestPack& other) {
    const bool first = other.unit < unit;
    if (other.value > value || (other.value == value && first) ||
        (isnan(other.value) && (first || !isnan(value)))) {
      *this = other;
    }
  }
  __device__ LargestPack of_lane(int mask) const {
    return {__shfl_xor_sync(0xffffffff, value, mask), __shfl_xor_sync(0xffffffff, unit, mask)};
  }
};

template <typename T>
__device__ void find_argmax_by_warp(const T* x, int64_t* out, const Tiling& tiling) {
  constexpr int SIZE = Pack<T>::SIZE;
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / 32;
  if (output >= tiling.kept.count) return;  // as do all lanes of the warp
  const Offsets place = place_of(tiling.kept, output);
  const auto* const packs = reinterpret_cast<const Pack<T>*>(x + place.offset);
  const int units = static_cast<int>(tiling.reduced.count), lane = threadIdx.x % 32;
  LargestPack found;
#pragma unroll 1
  for (int unit = lane; unit < units; unit += 32 * ROW_LOADS) {
    Load<T, Access::PACKS> loads[ROW_LOADS];
#pragma unroll
    for (int i = 0; i < ROW_LOADS; ++i) {
      const int at = unit + 32 * i;
      loads[i].from(reinterpret_cast<const T*>(packs + at), at < units);
    }
#pragma unroll
    for (int i = 0; i < ROW_LOADS; ++i) {
      if (unit + 32 * i < units) found.add(loads[i].pack, unit + 32 * i);
    }
  }
  found = merge_lanes(found, 32);
  if (lane != 0) return;
  int element = 0;  // also if nothing is above -inf
  if (found.unit < units) {
    const Pack<T> pack = packs[found.unit];
    int first = SIZE;  // the first element that equals the maximum, or is NaN
#pragma unroll
    for (int j = SIZE - 1; j >= 0; --j) {
      const float each = to_float(pack[j]);
      if (each == found.value || isnan(each)) first = j;
    }
    element = found.unit * SIZE + first;
  }
  out[place.step] = element * tiling.reduced.axis[0].step;
}
