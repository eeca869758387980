// Columns of v06 whose rows start anywhere within 16 bytes: packs of columns, shifted together from two
// aligned loads. Terms: docs/glossary.md.
#pragma once

#include "shifted_access.cuh"
#include "split_columns.cuh"

// A tiling of which kept's innermost axis counts packs of columns, the last one of each run ragged.
struct ShiftedTiling : Tiling {
  int64_t columns_run;  // neighbouring columns
};

// `narrow`: the same columns by single elements. The tiles are still those of these.
template <typename T>
ShiftedTiling shifted_packs_of(const Tiling& narrow) {
  constexpr int64_t SIZE = Pack<T>::SIZE;
  ShiftedTiling tiling{narrow};
  const Axis inner = narrow.kept.inner();
  tiling.columns_run = inner.size;
  tiling.kept.set_inner({cdiv(inner.size, SIZE), SIZE, SIZE * inner.step});
  return tiling;
}

// The same in tiles. `depth`: loads in flight a thread; `resident`: blocks that the GPU holds at once. Tiles
// are wide if such ones fill it twice: fewer threads then share their rows.
template <typename T>
ShiftedTiling shifted_tiling_of(const Tiling& narrow, int depth, int64_t resident) {
  constexpr int64_t NARROW = 32, WIDE = 64;  // packs
  ShiftedTiling tiling = shifted_packs_of<T>(narrow);
  const int64_t packs = tiling.kept.count, width = packs >= 2 * WIDE * resident ? WIDE : NARROW;
  const int64_t side_by_side = std::min(power_of_two_from(packs), width);
  const int64_t rows = std::min(power_of_two_from(cdiv(tiling.units(), depth)), THREADS / side_by_side);
  tiling.columns = static_cast<int>(THREADS / std::max<int64_t>(rows, 1));
  tiling.tiles = cdiv(packs, tiling.columns);
  return tiling;
}

// How a thread adds the columns of a pack (see reduce_columns).
template <typename T>
struct Shifted {
  using Layout = ShiftedTiling;
  static constexpr int WIDTH = Pack<T>::SIZE;

  // How many columns of the run are in the pack.
  __device__ static int count(const ShiftedTiling& tiling, int64_t pack) {
    const int64_t before = spot_of(tiling.kept, pack).inner * WIDTH;
    return static_cast<int>(min(tiling.columns_run - before, int64_t{WIDTH}));
  }

  template <int DEPTH, typename Total>
  __device__ static void add(Total (&totals)[WIDTH], const T* x, int64_t pack, const ShiftedTiling& tiling,
                             const Share& share) {
    const T *const columns = x + place_of(tiling.kept, pack).offset, *const end = x + tiling.extent;
    const int own = count(tiling, pack);
#pragma unroll 1
    for (int64_t row = share.unit; row < share.end; row += share.round) {
      ShiftedLoad<T> loads[DEPTH];
      int64_t place[DEPTH];
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        const int64_t at = row + i * share.stride;
        const Offsets found = place_of(tiling.reduced, at < share.end ? at : row);
        place[i] = found.step;
        loads[i].from(columns + found.offset, at < share.end, x, end);
      }
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        if (row + i * share.stride >= share.end) break;
        const Pack<T> taken = loads[i].taken(own);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) totals[j].add(taken[j], place[i]);
      }
    }
  }
};

// Whether an output's elements are short runs, which lie side by side with those of its neighbours, in many
// rows: then these are columns, of which each output has a run of totals. Runs of some packs and a rest are,
// too, since their first and last packs are ragged.
template <typename T>
bool are_runs_columns(const Tiling& tiling) {
  constexpr int64_t MANY_ROWS = 16, MOST_PACKS = 8;
  const Axis &kept = tiling.kept.inner(), &units = tiling.reduced.inner();
  const bool ragged = tiling.run % Pack<T>::SIZE != 0 && tiling.run <= MOST_PACKS * Pack<T>::SIZE;
  const bool short_runs = tiling.wide ? ragged : units.stride == 1 && tiling.run > 1;
  return tiling.columns == 0 && short_runs && tiling.kept.rank == 1 && kept.step == 1 &&
         kept.stride == tiling.run && tiling.reduced.count >= MANY_ROWS * units.size;
}

// The columns of such runs.
inline Tiling columns_of_runs(const Tiling& along) {
  Tiling tiling = along;
  tiling.wide = false;
  tiling.kept.set_inner({along.kept.count * along.run, 1, 1});
  tiling.reduced.count /= along.reduced.inner().size;
  tiling.reduced.rank -= 1;
  tiling.column_step = 1;
  return tiling;
}

// An output's totals of its columns, in their order. totals: [outputs, run], fp32.
template <typename T, typename Total>
__device__ void merge_runs(const float* totals, void* out, int64_t outputs, int run, float divisor) {
  const int64_t output = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (output >= outputs) return;
  Total total = Total::none();
  for (int i = 0; i < run; ++i) total.merge({totals[output * run + i]});
  store<T>(total, out, output, divisor);
}
