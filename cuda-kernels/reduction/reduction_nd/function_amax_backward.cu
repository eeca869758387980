// The gradient of a maximum over any axes: dx = dout / ties where x is the maximum, else 0.
//
// Threads lie along the axis that is contiguous in memory. If that is a reduced one, threads share an output;
// if it is a kept one, a thread has the outputs of a pack, and others share its rows. If a block's registers
// hold an output's elements, x is read once: counted, then dx is written from registers. Otherwise there are
// two passes, the first of which counts; outputs that are few are split into parts, whose counts meet by
// atomic additions of integers: these give the same sum in any order.
// Twin: triton-kernels/reduction/reduction_nd/amax_backward.py
#include "amax_backward.h"

#include "amax_backward_moves.cuh"
#include "amax_backward_walk.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int RESIDENT = 8;                  // blocks an SM of a pass
constexpr int64_t MOST_PARTS = 65535;        // of a grid's second axis
constexpr int FEW_HELD = 4, MANY_HELD = 16;  // units in a thread's registers
constexpr int LOADS = 4;                     // in flight a thread at once
constexpr int LINE_OF_PACKS = 8;             // packs side by side that fill a line

enum class Pass {
  BOTH,    // count, then write what registers hold
  COUNTS,  // adds to ties
  WRITES,  // from ties
};

// Where a unit's elements are, and how many of an item's they are: 0 behind the last unit.
struct Unit {
  int64_t in_x, in_dx;
  int count;
};

// One thread's item.
template <int WIDTH, bool ALONG>
struct Item {
  Spots first;
  int own, own_last;  // columns, and those of a folded problem's last row; 0 if there is no such item

  __device__ Item(const Problem& problem, int64_t item) {
    const bool exists = item < problem.kept.axes.count;
    first = spots_of(problem.kept, exists ? item : 0);
    const auto columns = [&](int64_t run) {
      return static_cast<int>(min(max(run - first.inner * WIDTH, int64_t{0}), int64_t{WIDTH}));
    };
    own = exists ? (ALONG ? 1 : columns(problem.run)) : 0;
    own_last = exists && !ALONG && problem.folds() ? columns(problem.last_run) : own;
  }

  // The place in out of output i.
  __device__ int64_t output(const Problem& problem, int i) const {
    if (ALONG) return first.in_out;
    unsigned column = i;
    if (problem.folds()) column = static_cast<unsigned>(first.inner * WIDTH + i) % problem.period;
    return first.in_out + column * problem.step;
  }

  __device__ Unit unit(const Problem& problem, int64_t index) const {
    const int64_t units = problem.reduced.axes.count;
    const Spots spots = spots_of(problem.reduced, min(index, units - 1));
    int count = index == units - 1 ? own_last : own;
    if (ALONG && own > 0) count = static_cast<int>(min(problem.run - spots.inner * WIDTH, int64_t{WIDTH}));
    return {first.in_x + spots.in_x, first.in_dx + spots.in_dx, index < units ? count : 0};
  }
};

// What each maximum's elements get, and what all others get: 0, but NaN where nothing equals a maximum of
// NaN.
template <typename T, Moves MOVES>
struct Shares {
  Moved<T, MOVES> share, nothing;  // by output

  __device__ void set_of(int i, T dout, unsigned ties) {
    const T each = from_float<T>(to_float(dout) / static_cast<float>(ties));
    set(share, i, each);
    set(nothing, i, from_float<T>(to_float(each) * 0.0f));
  }
};

// Blocks an SM, and loads in flight a thread, as registers allow.
template <Moves MOVES>
constexpr bool SHIFTS = MOVES == Moves::SHIFTED_LOADS || MOVES == Moves::SHIFTED;
template <Moves MOVES, Pass PASS, int HELD>
constexpr int FITTING = HELD == MANY_HELD || (SHIFTS<MOVES> && PASS == Pass::WRITES) ? 2
                        : MOVES == Moves::ELEMENTS                                   ? 4
                                                                                     : 3;
template <Moves MOVES, bool ALONG, int HELD>
constexpr int LOADS_OF = SHIFTS<MOVES> && ALONG && HELD == MANY_HELD ? LOADS / 2 : LOADS;

// x, dx: addressed by the walks; out, dout, ties: by the kept one. ALONG: the contiguous axis is reduced.
// HELD: the units of a thread that are loaded before one is used; in a pass, it has several times as many.
template <typename T, Moves MOVES, bool ALONG, Pass PASS, int HELD>
__global__ void __launch_bounds__(THREADS, FITTING<MOVES, PASS, HELD>)
    reduction_nd_amax_backward_kernel(const T* __restrict__ x, const T* __restrict__ out,
                                      const T* __restrict__ dout, unsigned* ties, T* __restrict__ dx,
                                      const __grid_constant__ Problem problem) {
  constexpr int WIDTH = WIDTH_OF<T, MOVES>, OUTPUTS = ALONG ? 1 : WIDTH;
  __shared__ unsigned counts[PASS == Pass::WRITES ? 1 : THREADS * OUTPUTS];  // [items of the block, OUTPUTS]
  const int items = THREADS / problem.sharing;
  const int local = ALONG ? threadIdx.x / problem.sharing : threadIdx.x % items;
  const int lane = ALONG ? threadIdx.x % problem.sharing : threadIdx.x / items;
  const Item<WIDTH, ALONG> item(problem, static_cast<int64_t>(blockIdx.x) * items + local);
  const T* const end = x + problem.extent;

  float largest[OUTPUTS];
  Shares<T, MOVES> shares;
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) {
    largest[i] = i < item.own ? to_float(out[item.output(problem, i)]) : NAN;  // which equals nothing
    if constexpr (PASS == Pass::WRITES) {
      const int64_t at = item.output(problem, i);
      if (i < item.own) shares.set_of(i, dout[at], ties[at]);
    } else {
      counts[threadIdx.x * OUTPUTS + i] = 0;
    }
  }
  if constexpr (PASS != Pass::WRITES) __syncthreads();  // waits for the zeros

  unsigned found[OUTPUTS] = {};
  const auto count_in = [&](const auto& moved, const Unit& unit) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const bool inside = MOVES == Moves::PACKS ? unit.count > 0 : i < unit.count;
      found[ALONG ? 0 : i] += inside && to_float(moved[i]) == largest[ALONG ? 0 : i];
    }
  };
  const auto write = [&](const auto& moved, const Unit& unit) {
    Moved<T, MOVES> gradients;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const int output = ALONG ? 0 : i;
      set(gradients, i,
          to_float(moved[i]) == largest[output] ? shares.share[output] : shares.nothing[output]);
    }
    store_moved<MOVES>(dx + unit.in_dx, unit.count, gradients);
  };

  constexpr int AT_ONCE = LOADS_OF<MOVES, ALONG, HELD>;
  Moved<T, MOVES> held[HELD];
  const int64_t stride = static_cast<int64_t>(gridDim.y) * problem.sharing;
  const auto load = [&](int64_t unit) {
#pragma unroll
    for (int group = 0; group < HELD; group += AT_ONCE) {
      InFlight<T, MOVES> loads[AT_ONCE];
      int wanted[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const Unit from = item.unit(problem, unit + (group + k) * stride);
        wanted[k] = from.count;
        loads[k].from(x + from.in_x, from.count > 0, x, end);
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) held[group + k] = loads[k].taken(wanted[k]);
    }
  };
  const auto each = [&](int64_t unit, auto use) {
    // Defeats common subexpression elimination (CSE), which would keep the units' addresses since they were
    // loaded, and elements converted to fp32, in more registers than there are.
    asm volatile("" : "+l"(unit));
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
      if constexpr (WIDTH > 1) keep_packed(held[k]);
      use(held[k], item.unit(problem, unit + k * stride));
    }
  };
  if constexpr (PASS == Pass::BOTH) {
    load(lane);
    each(lane, count_in);
  } else {
    // The block's threads have the same rounds, so that a warp's lanes store together.
#pragma unroll 1
    for (int64_t round = static_cast<int64_t>(blockIdx.y) * problem.sharing;
         round < problem.reduced.axes.count; round += HELD * stride) {
      load(round + lane);
      if constexpr (PASS == Pass::COUNTS) each(round + lane, count_in);
      if constexpr (PASS == Pass::WRITES) each(round + lane, write);
    }
  }

  if constexpr (PASS != Pass::WRITES) {
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
      if (found[i] > 0) atomicAdd(&counts[local * OUTPUTS + i], found[i]);
    }
    __syncthreads();  // waits for the counts of all threads
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
      const unsigned number = counts[local * OUTPUTS + i];
      if constexpr (PASS == Pass::COUNTS) {
        if (lane == 0 && number > 0) atomicAdd(&ties[item.output(problem, i)], number);
      } else if (i < item.own) {
        shares.set_of(i, dout[item.output(problem, i)], number);
      }
    }
    if constexpr (PASS == Pass::BOTH) each(lane, write);
  }
}

// True if a tensor's packs along the inner axis of `inner` are aligned. `strides`: the tensor's, of a walk.
template <typename Strides>
bool are_aligned(const void* tensor, const Walk& inner, const Walk& other, int width, Strides strides) {
  if (!aligned_to_16_bytes(tensor)) return false;
  for (const Walk* walk : {&inner, &other}) {
    for (int a = 0; a < walk->axes.rank - (walk == &inner); ++a) {
      if (strides(*walk, a) % width) return false;
    }
  }
  return true;
}

// `inner`: the walk of the contiguous axis.
Moves moves_of(const AmaxBackwardArgs& args, const Problem& problem, const Walk& inner, const Walk& other,
               int width) {
  if (inner.inner().stride != 1 || inner.inner_target() != 1 || problem.run < width) return Moves::ELEMENTS;
  const auto target = [](const Walk& walk, int a) { return walk.targets[a]; };
  const auto stride = [](const Walk& walk, int a) { return walk.axes.axis[a].stride; };
  if (!are_aligned(args.dx, inner, other, width, target)) return Moves::SHIFTED;
  const bool whole = problem.run % width == 0 && !problem.folds();
  return whole && are_aligned(args.x, inner, other, width, stride) ? Moves::PACKS : Moves::SHIFTED_LOADS;
}

template <typename T, Moves MOVES, bool ALONG, Pass PASS, int HELD>
void launch(const AmaxBackwardArgs& args, const Problem& problem, dim3 grid, unsigned* ties) {
  reduction_nd_amax_backward_kernel<T, MOVES, ALONG, PASS, HELD><<<grid, THREADS, 0, args.stream>>>(
      static_cast<const T*>(args.x), static_cast<const T*>(args.out), static_cast<const T*>(args.dout), ties,
      static_cast<T*>(args.dx), problem);
  CUDA_CHECK(cudaGetLastError());
}

int64_t outputs_of(const AmaxBackwardArgs& args) {
  int64_t outputs = 1;
  for (int axis = 0; axis < args.rank; ++axis) outputs *= args.reduced[axis] ? 1 : args.sizes[axis];
  return outputs;
}

template <typename T, Moves MOVES, bool ALONG>
void launch(const AmaxBackwardArgs& args, Problem problem) {
  constexpr int WIDTH = WIDTH_OF<T, MOVES>;
  const int64_t outputs = outputs_of(args);
  (ALONG ? problem.reduced : problem.kept).pack(WIDTH);
  const int64_t items = problem.kept.axes.count, units = problem.reduced.axes.count;
  // Down columns, at least a line's of them are side by side, in a pass a warp's.
  const auto most_sharing = [&](int side_by_side) {
    return ALONG ? int64_t{THREADS} : THREADS / std::min(power_of_two_from(items), int64_t{side_by_side});
  };
  const auto grid_of = [&](int64_t parts) { return dim3(cdiv(items, THREADS / problem.sharing), parts); };
  const int64_t line = most_sharing(WIDTH > 1 ? LINE_OF_PACKS : 32);
  if (!problem.folds() && units <= MANY_HELD * line) {
    const bool few = units <= FEW_HELD * std::min(line, int64_t{32});
    problem.sharing = static_cast<int>(power_of_two_from(cdiv(units, few ? FEW_HELD : MANY_HELD)));
    const auto launched =
        few ? launch<T, MOVES, ALONG, Pass::BOTH, FEW_HELD> : launch<T, MOVES, ALONG, Pass::BOTH, MANY_HELD>;
    return launched(args, problem, grid_of(1), nullptr);
  }
  problem.sharing = static_cast<int>(
      std::min(power_of_two_from(cdiv(units, LOADS)), most_sharing(problem.folds() ? THREADS : 32)));
  const int64_t parts = std::min({multiprocessor_count() * int64_t{RESIDENT} / grid_of(1).x,
                                  cdiv(units, int64_t{problem.sharing} * LOADS), MOST_PARTS});
  auto* const ties = static_cast<unsigned*>(args.memory->workspace(outputs * sizeof(unsigned)));
  CUDA_CHECK(cudaMemsetAsync(ties, 0, outputs * sizeof(unsigned), args.stream));
  const dim3 grid = grid_of(std::max(parts, int64_t{1}));
  launch<T, MOVES, ALONG, Pass::COUNTS, LOADS>(args, problem, grid, ties);
  launch<T, MOVES, ALONG, Pass::WRITES, LOADS>(args, problem, grid, ties);
}

template <typename T, bool ALONG>
void launch(const AmaxBackwardArgs& args, Problem problem) {
  constexpr int SIZE = Pack<T>::SIZE;
  const Walk& inner = ALONG ? problem.reduced : problem.kept;
  const Walk& other = ALONG ? problem.kept : problem.reduced;
  const Axis& row = problem.reduced.inner();
  const int64_t columns = problem.run;
  if (!ALONG && inner.inner().stride == 1 && inner.inner_target() == 1 && problem.reduced.axes.rank == 1 &&
      row.stride == columns && problem.reduced.inner_target() == columns && columns < 32 * SIZE &&
      row.size > int64_t{MANY_HELD} * THREADS) {
    fold(problem, SIZE, THREADS * SIZE);
  }
  switch (moves_of(args, problem, inner, other, SIZE)) {
    case Moves::ELEMENTS:
      return launch<T, Moves::ELEMENTS, ALONG>(args, problem);
    case Moves::PACKS:
      return launch<T, Moves::PACKS, ALONG>(args, problem);
    case Moves::SHIFTED_LOADS:
      return launch<T, Moves::SHIFTED_LOADS, ALONG>(args, problem);
    case Moves::SHIFTED:
      return launch<T, Moves::SHIFTED, ALONG>(args, problem);
  }
}

}  // namespace

void reduction_nd_amax_backward(const AmaxBackwardArgs& args) {
  Problem problem{.kept = walk_of(args, false), .reduced = walk_of(args, true)};
  problem.step = problem.kept.inner().step;
  problem.extent = extent_of(problem.kept.axes, problem.reduced.axes);
  const bool along = along_reduced(problem.kept.axes, problem.reduced.axes);
  problem.run = (along ? problem.reduced : problem.kept).inner().size;
  dispatch(args.dtype, [&](auto zero) {
    along ? launch<decltype(zero), true>(args, problem) : launch<decltype(zero), false>(args, problem);
  });
}
