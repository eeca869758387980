// The axes of a maximum's gradient, and how its elements are dealt out to threads.
#pragma once

#include "amax_backward.h"
#include "lib/walk.cuh"
#include "merged_axes.h"

// The kept or the reduced axes, merged where they continue in x, dx and out alike; the last has x's least
// stride. An axis' step is the one in out, 0 if the axis is reduced.
struct Walk {
  Axes axes;
  int64_t targets[MOST_AXES];  // in elements of dx

  const Axis& inner() const { return axes.inner(); }
  int64_t inner_target() const { return targets[axes.rank - 1]; }
  void set_inner(Axis axis, int64_t target) {
    axes.set_inner(axis);
    targets[axes.rank - 1] = target;
  }
  // Counts packs of `width` elements along the inner axis, of which the first one may begin `lead` elements
  // before the axis, and the last one may be ragged.
  void pack(int64_t width, int64_t lead) {
    const Axis single = inner();
    set_inner(Axis(cdiv(single.size + lead, width), single.stride * width, single.step * width),
              inner_target() * width);
  }
};

inline Walk walk_of(const AmaxBackwardArgs& args, bool reduced) {
  struct Found : Axis {
    int64_t target;
  };
  Found found[MOST_AXES];  // the innermost first
  int count = 0;
  int64_t step = 1;
  for (int a = args.rank - 1; a >= 0; --a) {
    if (args.reduced[a] != reduced) continue;
    if (args.sizes[a] != 1) {
      found[count++] = {Axis(args.sizes[a], args.strides[a], reduced ? 0 : step), args.targets[a]};
    }
    step *= args.sizes[a];
  }
  const int merged = merge(found, count, [](const Found& outer, const Found& inner) {
    return outer.step == inner.size * inner.step && outer.target == inner.size * inner.target;
  });

  Walk walk;
  walk.axes.rank = merged;
  for (int a = 0; a < merged; ++a) {
    walk.axes.axis[a] = found[merged - 1 - a];
    walk.targets[a] = found[merged - 1 - a].target;
    walk.axes.count *= walk.axes.axis[a].size;
  }
  return walk;
}

struct Spots {
  int64_t in_x, in_dx, in_out;
  int64_t inner;  // the coordinate along the innermost axis
};

// The coordinate along an axis, as split_off gives it, of a number of 32 bits.
__device__ inline uint32_t split_off(uint32_t& index, const Axis& axis) {
  const auto size = static_cast<uint32_t>(axis.size);
  uint32_t quotient = __umulhi(index, static_cast<uint32_t>(axis.reciprocal >> 32));
  uint32_t rest = index - quotient * size;
  if (rest >= size) {
    ++quotient;
    rest -= size;
  }
  index = quotient;
  return rest;
}

template <typename Index, int COUNT>
__device__ void find_spots(Spots (&spots)[COUNT], const Walk& walk, const int64_t (&numbers)[COUNT]) {
  Index indices[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    indices[i] = static_cast<Index>(numbers[i]);
    spots[i] = {};
  }
#pragma unroll 1  // an axis at a time, so that its numbers are read once for all indices
  for (int a = walk.axes.rank - 1; a >= 0; --a) {
    const Axis& axis = walk.axes.axis[a];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const auto at = static_cast<int64_t>(a > 0 ? split_off(indices[i], axis) : indices[i]);
      if (a == walk.axes.rank - 1) spots[i].inner = at;
      spots[i].in_x += at * axis.stride;
      spots[i].in_dx += at * walk.targets[a];
      spots[i].in_out += at * axis.step;
    }
  }
}

template <int COUNT>
__device__ void find_spots(Spots (&spots)[COUNT], const Walk& walk, const int64_t (&numbers)[COUNT]) {
  const Axis& outermost = walk.axes.axis[0];
  if (walk.axes.rank > 1) {
    return walk.axes.count <= UINT32_MAX ? find_spots<uint32_t>(spots, walk, numbers)
                                         : find_spots<int64_t>(spots, walk, numbers);
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int64_t at = numbers[i];
    spots[i] = {at * outermost.stride, at * walk.targets[0], at * outermost.step, at};
  }
}

// An item is what a thread has of the kept axes: an output, or a pack of columns. A unit is an item's part at
// one place of the reduced axes. `sharing` threads, a power of two, take turns at an item's units.
struct Problem {
  Walk kept, reduced;  // that of the contiguous axis counts packs
  int64_t step;        // in out, between a pack's neighbouring columns
  int64_t run;         // elements along the contiguous axis
  int64_t extent;      // of x, from its first element to behind its last one
  int sharing;
  int rounds;          // of a block: each of its threads loads several units at once in a round
  int per_warp;        // items: fewer than lanes if the last lane repeats the next warp's first item
  bool dx_is_aligned;  // at the starts of all runs
  // Rows of `period` columns are folded if they continue in memory: several are side by side as one row,
  // whose columns repeat the outputs; the last row has only `last_run` elements. 0: not folded.
  unsigned period;
  int64_t last_run;
  // Neighbouring columns with the same output, if short runs are columns; else 1.
  unsigned repeats;

  __host__ __device__ bool folds() const { return period > 0; }
  // Whether several columns of a row have the same output.
  __host__ __device__ bool shares_columns() const { return folds() || repeats > 1; }
};

// Whether an output's elements are runs of less than a pack, in many rows, which lie side by side with those
// of its neighbours. `size`: elements of a pack.
inline bool are_runs_columns(const Problem& problem, int64_t size) {
  constexpr int64_t MANY_ROWS = 16;
  const Axis &kept = problem.kept.inner(), &run = problem.reduced.inner();
  return problem.kept.axes.rank == 1 && problem.reduced.axes.rank > 1 && run.size < size && run.stride == 1 &&
         problem.reduced.inner_target() == 1 && kept.stride == run.size &&
         problem.kept.inner_target() == run.size && problem.reduced.axes.count >= MANY_ROWS * run.size;
}

// Takes the innermost reduced axis, a short run, for columns of its outputs, which lie side by side.
inline void take_runs_for_columns(Problem& problem) {
  const int64_t run = problem.reduced.inner().size;
  problem.repeats = static_cast<unsigned>(run);
  problem.run = problem.kept.inner().size * run;
  problem.kept.set_inner(Axis(problem.run, 1, 0), 1);
  problem.reduced.axes.rank -= 1;
  problem.reduced.axes.count /= run;
}

// Folds rows of few columns to rows of whole packs of `size` elements. A folded row takes one to eight tiles
// of `wide` elements: the fewest that it fills to nine tenths, else those that it fills best, since
// 129 columns of half precision fill half of a single tile.
inline void fold(Problem& problem, int64_t size, int64_t wide) {
  constexpr int64_t MOST_TILES = 8;
  const Axis columns = problem.kept.inner();
  const int64_t rows = problem.reduced.axes.count, least = columns.size * size;
  int64_t together = size, filled = 0;  // in thousandths
  for (int64_t tiles = 1; tiles <= MOST_TILES && filled < 900; ++tiles) {
    const int64_t times = tiles * wide / least;
    if (times * least * 1000 / (tiles * wide) <= filled) continue;
    together = times * size;
    filled = times * least * 1000 / (tiles * wide);
  }
  const int64_t row = together * columns.size;
  problem.period = static_cast<unsigned>(columns.size);
  problem.kept.set_inner(Axis(row, 1, 0), 1);
  problem.reduced.set_inner(Axis(cdiv(rows, together), row, 0), row);
  problem.last_run = (rows - 1) % together * columns.size + columns.size;
  problem.run = row;
}
