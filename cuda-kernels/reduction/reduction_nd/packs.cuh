// The loads of v05: v04's packs along a run of reduced elements or of columns, or single elements where packs
// do not fit, with several loads of a thread in flight. Terms: docs/glossary.md.
#pragma once

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "totals.cuh"
#include "walk.cuh"

constexpr int THREADS = 256;
constexpr int LOADS = 4;  // in flight a thread, unless the launcher says otherwise

enum class Access { ELEMENTS, PACKS };

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

// The division of a problem among blocks of THREADS threads.
//
// - Along a reduced axis (columns == 0): an output's elements are counted in `units`, the packs of its runs.
//   A run is the innermost axis's `run` elements; it may start anywhere, so its first and last pack may be
//   ragged.
// - Down columns: a unit is a row, and kept's innermost axis counts packs of columns.
struct Tiling {
  Axes kept;     // unchanged if not `wide`
  Axes reduced;  // its innermost axis counts units
  int64_t run;
  int64_t column_step;  // between a pack's neighbouring columns, in out
  bool wide;
  int lanes;      // threads an output: a power of two up to 32, or all of the block
  int columns;    // threads side by side, a power of two, each with the columns of a pack
  int64_t tiles;  // blocks, if none shares its outputs with another

  int64_t units() const { return reduced.count; }
  int sharing() const { return columns ? THREADS / columns : lanes; }  // threads that share an output
};

template <typename T>
Tiling tiling_of(const ReductionNdArgs& args, int64_t sms) {
  constexpr int64_t SIZE = Pack<T>::SIZE;
  constexpr int64_t FEW_UNITS = 32 * LOADS, MANY_UNITS = 16 * FEW_UNITS;
  Tiling tiling{.kept = args.kept, .reduced = args.reduced};
  Axes &kept = tiling.kept, &reduced = tiling.reduced;
  // True if all steps between packs are multiples of 16 bytes.
  const auto aligned = [](const Axes& axes, int axes_looked_at) {
    return std::all_of(axes.axis, axes.axis + axes_looked_at,
                       [](const Axis& axis) { return axis.stride % SIZE == 0; });
  };
  const bool x_aligned = aligned_to_16_bytes(args.x);
  tiling.run = reduced.inner().size;
  if (along_reduced(kept, reduced)) {
    const bool whole = x_aligned && aligned(kept, kept.rank) && aligned(reduced, reduced.rank - 1);
    tiling.wide = reduced.inner().stride == 1 && tiling.run >= (whole ? SIZE : 4 * SIZE);
    if (tiling.wide) {  // one more pack if runs may start within a pack
      reduced.set_inner({cdiv(tiling.run + (whole ? 0 : SIZE - 1), SIZE), 0, reduced.inner().step});
    }
    const int64_t units = reduced.count;
    const bool by_block = units > MANY_UNITS || (units > FEW_UNITS && kept.count < 32 * sms);
    const int64_t busy = power_of_two_from(cdiv(units, LOADS));
    tiling.lanes = by_block ? THREADS : static_cast<int>(std::min(busy, int64_t{32}));
    tiling.tiles = cdiv(kept.count, THREADS / tiling.lanes);
  } else {
    const Axis inner = kept.inner();
    tiling.column_step = inner.step;
    tiling.wide = inner.stride == 1 && inner.size % SIZE == 0 && x_aligned && aligned(kept, kept.rank - 1) &&
                  aligned(reduced, reduced.rank);
    if (tiling.wide) kept.set_inner({inner.size / SIZE, SIZE, SIZE * inner.step});
    // At least a warp's width of columns; the other threads share the rows, as far as each of them gets some.
    const int64_t side_by_side = std::min(power_of_two_from(kept.count), int64_t{32});
    const int64_t rows = std::min(power_of_two_from(cdiv(reduced.count, LOADS)), THREADS / side_by_side);
    tiling.columns = static_cast<int>(THREADS / rows);
    tiling.tiles = cdiv(kept.count, tiling.columns);
  }
  if (tiling.tiles > std::numeric_limits<int>::max()) {  // possible if x is expanded
    throw std::runtime_error(
        "reduction_nd takes " + std::to_string(tiling.tiles) +
        " blocks for this x, a grid has up to 2147483647: reduce a part of it at a time");
  }
  return tiling;
}

// The units of an output that one thread takes: `loads` of them, `stride` apart, and as many again every
// `round` units, up to `end`. In a round the units of `sharing` threads lie side by side, and behind them
// those of the next part.
struct Share {
  int64_t unit, end, round;
  int stride;

  __device__ Share(const Tiling& tiling, int own, int sharing, int loads, int part = 0, int parts = 1)
      : unit(static_cast<int64_t>(part) * loads * sharing + own),
        end(tiling.reduced.count),
        round(static_cast<int64_t>(parts) * loads * sharing),
        stride(sharing) {}
};

// Along a reduced axis: adds this thread's share of an output's elements to its total, with DEPTH loads in
// flight.
template <typename T, Access ACCESS, int DEPTH, typename Total>
__device__ void add_along(Total& total, const T* x, const Tiling& tiling, const Share& share) {
  constexpr bool WIDE = ACCESS == Access::PACKS;
  constexpr int WIDTH = Load<T, ACCESS>::WIDTH;
  const Axis& inner = tiling.reduced.axis[tiling.reduced.rank - 1];
#pragma unroll 1  // or the compiler unrolls rounds, too, and more than DEPTH loads are in flight
  for (int64_t unit = share.unit; unit < share.end; unit += share.round) {
    Load<T, ACCESS> loads[DEPTH];
    int64_t first[DEPTH];  // element within its run; at least the run's size if there is nothing to add
    int64_t place[DEPTH];  // argmax's index of the run's first element
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int64_t at = unit + i * share.stride;
      const Spot spot = spot_of(tiling.reduced, at < share.end ? at : unit);
      const T* run = x + spot.outer.offset;
      const int skew = WIDE ? static_cast<int>(reinterpret_cast<uintptr_t>(run) % 16 / sizeof(T)) : 0;
      first[i] = at < share.end ? spot.inner * WIDTH - skew : tiling.run;
      place[i] = spot.outer.step;
      loads[i].from(run + (WIDE ? first[i] : first[i] * inner.stride), first[i] < tiling.run);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (first[i] >= 0 && first[i] + WIDTH <= tiling.run) {
        loads[i].all_to(total, place[i] + first[i] * inner.step, inner.step);
      } else {
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
          const int64_t at = first[i] + j;
          if (at >= 0 && at < tiling.run) total.add(loads[i][j], place[i] + at * inner.step);
        }
      }
    }
  }
}

// Down columns: adds this thread's share of the rows to the totals of the columns that begin at x, with DEPTH
// loads in flight.
template <typename T, Access ACCESS, int DEPTH = LOADS, typename Total>
__device__ void add_down(Total (&totals)[Load<T, ACCESS>::WIDTH], const T* x, const Tiling& tiling,
                         const Share& share) {
#pragma unroll 1
  for (int64_t row = share.unit; row < share.end; row += share.round) {
    Load<T, ACCESS> loads[DEPTH];
    int64_t place[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int64_t at = row + i * share.stride;
      const Place found = place_of(tiling.reduced, at < share.end ? at : row);
      place[i] = found.step;
      loads[i].from(x + found.offset, at < share.end);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      if (row + i * share.stride >= share.end) break;
#pragma unroll
      for (int j = 0; j < Load<T, ACCESS>::WIDTH; ++j) totals[j].add(loads[i][j], place[i]);
    }
  }
}

// Down columns: the totals of all threads of a block in shared memory, [rows, columns of the tile].
template <typename T, Access ACCESS, typename Total>
struct ColumnParts {
  static constexpr int WIDTH = Load<T, ACCESS>::WIDTH;
  static constexpr int SIZE = THREADS * WIDTH;

  __device__ static void put(Total* parts, const Total (&totals)[WIDTH]) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) parts[threadIdx.x * WIDTH + j] = totals[j];
  }
  // The total of one of the tile's `width` columns, merged over the rows in order.
  __device__ static Total merged(const Total* parts, int column, int width) {
    Total total = parts[column];
    for (int at = column + width; at < SIZE; at += width) total.merge(parts[at]);
    return total;
  }
};
