// Columns of v06 with few rows: a thread has all rows of a pack of columns, and nothing is merged between
// threads. Terms: docs/glossary.md.
#pragma once

#include "shifted_columns.cuh"

constexpr int SHORT_THREADS = 128;

// The total of a column whose rows are added in order.
template <typename Total>
struct Running {
  Total total = Total::none();

  template <typename T>
  __device__ void add(T element, unsigned) {
    total.add(element, 0);
  }
  __device__ Total finished(const Tiling&) const { return total; }
};
// Rows come in order, so an equal element is never the first one, and a row's 32-bit number is enough.
template <>
struct Running<ArgMax> {
  float value = -INFINITY;
  unsigned row = 0;  // also if all elements are -inf

  template <typename T>
  __device__ void add(T element, unsigned at) {
    const float other = to_float(element);
    // NaN wins, once. No && here: it would be a branch for every element.
    const bool wins = static_cast<int>(!(other <= value)) & static_cast<int>(!isnan(value));
    value = wins ? other : value;
    row = wins ? at : row;
  }
  __device__ ArgMax finished(const Tiling& tiling) const {
    return {value, row * tiling.reduced.axis[0].step};
  }
};

// A pack whose words are whole and aligned, with the interface of ShiftedLoad.
template <typename T>
struct AlignedLoad {
  Load<T, Access::PACKS> load;

  __device__ void from(const T* place, bool wanted, const T*, const T*) { load.from(place, wanted); }
  __device__ Pack<T> taken(int) const { return load.pack; }
};

// Stores the totals of `count` columns at `out`, `step` apart. All lanes of a warp call it.
template <typename T, typename Total>
__device__ void store_totals(const Total (&totals)[Pack<T>::SIZE], void* out, int64_t at, int64_t step,
                             int count, float divisor) {
  constexpr int SIZE = Pack<T>::SIZE;
  if constexpr (!std::is_same_v<Total, ArgMax>) {
    if (step == 1) {
      Pack<T> pack;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) set(pack, j, from_float<T>(totals[j].result(divisor)));
      return store_anywhere(static_cast<T*>(out) + at, count, pack);
    }
  } else {
    auto* const places = static_cast<int64_t*>(out) + at;
    if (step == 1 && count == SIZE && reinterpret_cast<uintptr_t>(places) % 16 == 0) {
#pragma unroll
      for (int j = 0; j < SIZE; j += 2) {
        *reinterpret_cast<longlong2*>(places + j) = make_longlong2(totals[j].place, totals[j + 1].place);
      }
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < SIZE; ++j) {
    if (j < count) store<T>(totals[j], out, at + j * step, divisor);
  }
}

// Words: ShiftedLoad<T> or AlignedLoad<T>; DEPTH of them are in flight a thread.
template <typename T, typename Words, int DEPTH, typename Total>
__device__ void reduce_short_columns(const T* x, void* out, const ShiftedTiling& tiling, float divisor) {
  constexpr int SIZE = Pack<T>::SIZE;
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * SHORT_THREADS + threadIdx.x;
  const bool exists = pack < tiling.kept.count;  // otherwise the thread only joins the shuffles
  const Offsets first = place_of(tiling.kept, exists ? pack : 0);
  const int own = exists ? Shifted<T>::count(tiling, pack) : 0;
  const T *const columns = x + first.offset, *const end = x + tiling.extent;
  const unsigned rows = exists ? static_cast<unsigned>(tiling.reduced.count) : 0;
  Running<Total> running[SIZE];
#pragma unroll 1
  for (unsigned row = 0; row < rows; row += DEPTH) {
    Words loads[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const unsigned at = row + i;
      loads[i].from(columns + place_of(tiling.reduced, at < rows ? at : row).offset, at < rows, x, end);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (row + i >= rows) break;
      const Pack<T> taken = loads[i].taken(own);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) running[j].add(taken[j], row + i);
    }
  }
  Total totals[SIZE];
#pragma unroll
  for (int j = 0; j < SIZE; ++j) totals[j] = running[j].finished(tiling);
  store_totals<T>(totals, out, first.step, tiling.column_step, own, divisor);
}

// The same columns by packs.
template <typename T>
ShiftedTiling short_tiling_of(const Tiling& tiling) {
  if (!tiling.wide) return shifted_packs_of<T>(tiling);
  ShiftedTiling packs{tiling};
  packs.columns_run = tiling.kept.inner().size * Pack<T>::SIZE;
  return packs;
}
