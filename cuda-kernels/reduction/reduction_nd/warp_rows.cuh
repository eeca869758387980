// Many outputs of v06, each of some thousand whole packs: a warp an output, and nothing is merged between
// warps. Terms: docs/glossary.md.
#pragma once

#include "lib/load.cuh"
#include "tiling.cuh"

constexpr int ROW_LOADS = 2 * LOADS, ROW_RESIDENT = 3;

// A block needs a last round of loads, which may be nearly empty, and a barrier for every output; warps need
// neither, but the last ones end alone. So they suit outputs that are many, and too short for a block to be
// long at work. All runs must be whole packs, and lie along one axis.
template <typename T>
bool are_rows_by_warp(const Tiling& tiling, int64_t sms) {
  constexpr int64_t WAVES_OF_WARPS = 4, ROUNDS_OF_BLOCK = 4;
  const bool whole = tiling.wide && tiling.tail == 0 && tiling.run % Pack<T>::SIZE == 0 &&
                     tiling.reduced.inner().size == tiling.run / Pack<T>::SIZE;
  const bool walked = tiling.reduced.rank <= 2 && tiling.reduced.inner().size >= 32;
  return tiling.columns == 0 && whole && walked && tiling.lanes == THREADS &&
         tiling.kept.count >= WAVES_OF_WARPS * sms * ROW_RESIDENT * (THREADS / 32) &&
         tiling.units() <= ROUNDS_OF_BLOCK * THREADS * ROW_LOADS;
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
