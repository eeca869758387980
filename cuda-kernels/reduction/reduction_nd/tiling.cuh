// The division of a reduction among blocks and threads, for v04 and later steps. Terms: docs/glossary.md.
#pragma once

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "lib/walk.cuh"
#include "totals.cuh"

constexpr int THREADS = 256;
constexpr int LOADS = 4;  // in flight a thread, unless the launcher says otherwise

// Kernels that need not look for a tail take fewer registers.
enum class End { PACKS, TAIL };

// The division of a problem among blocks of THREADS threads.
//
// - Along a reduced axis (columns == 0): an output's elements are counted in `units`, the packs of its runs.
//   A run is the innermost axis's `run` elements; it may start anywhere, so its first and last pack may be
//   ragged. If x ends within 16 bytes, the last output's last pack would reach beyond it: then its elements
//   are a tail, and single.
// - Down columns: a unit is a row, and kept's innermost axis counts packs of columns.
struct Tiling {
  Axes kept;     // unchanged if not `wide`
  Axes reduced;  // its innermost axis counts units
  int64_t run;
  int64_t column_step;  // between a pack's neighbouring columns, in out
  int64_t extent;       // of x, from its first element to behind its last one
  int tail;             // elements
  int64_t tail_units;   // from the one with the tail on: those behind it are empty
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
  Tiling tiling{.kept = args.kept, .reduced = args.reduced, .extent = extent_of(args.kept, args.reduced)};
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
    const int64_t end = static_cast<int64_t>(reinterpret_cast<uintptr_t>(args.x) / sizeof(T)) + tiling.extent;
    const bool has_tail = end % SIZE != 0 && kept.count * reduced.count > 0;
    tiling.wide = reduced.inner().stride == 1 && tiling.run >= (whole ? SIZE : 4 * SIZE) &&
                  !(has_tail && ends_meet(kept, reduced, SIZE));
    if (tiling.wide) {  // one more pack if runs may start within a pack
      reduced.set_inner({cdiv(tiling.run + (whole ? 0 : SIZE - 1), SIZE), 0, reduced.inner().step});
    }
    if (tiling.wide && has_tail) {
      tiling.tail = static_cast<int>(end % SIZE);
      tiling.tail_units = reduced.inner().size - ((end - tiling.run) % SIZE + tiling.run) / SIZE;
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

// Adds the tail to the last output's total. x: its first element.
template <typename T, typename Total>
__device__ void add_tail(Total& total, const T* x, const Tiling& tiling) {
  const Axis& inner = tiling.reduced.axis[tiling.reduced.rank - 1];
  const int64_t place = spot_of(tiling.reduced, tiling.reduced.count - 1).outer.step;
  for (int left = tiling.tail; left > 0; --left) {
    total.add(x[tiling.extent - left], place + (tiling.run - left) * inner.step);
  }
}
