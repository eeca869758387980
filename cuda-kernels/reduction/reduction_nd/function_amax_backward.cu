// The gradient of a maximum over any axes: dx = dout / ties where x is the maximum, else 0.
//
// Threads lie along the axis that is contiguous in memory. If that is a reduced one, threads share an output;
// if it is a kept one, a thread has the outputs of a pack, and others share its rows. Reduced runs of less
// than a pack, side by side with those of other outputs, are columns that share outputs. x is read once: a
// thread marks each element that equals its maximum by a bit, and counts them. Then dx is written from the
// bits and the counts. If there are outputs enough, a block has all elements of its outputs, and shared
// memory has the bits. Otherwise outputs are split into parts, and two launches have the bits in a workspace;
// the counts meet by atomic additions of integers, which give the same sum in any order. Twin:
// triton-kernels/reduction/reduction_nd/amax_backward.py
#include "amax_backward.h"

#include "amax_backward_bits.cuh"
#include "amax_backward_walk.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int64_t MOST_PARTS = 65535;       // of a grid's second axis
constexpr int64_t MOST_HELD_BYTES = 32768;  // bits in a block's shared memory
constexpr int FOLDED_ROWS = 16 * THREADS;   // above so many, few columns are folded
constexpr int LINE_OF_PACKS = 8;            // packs side by side that fill a line
constexpr int64_t LONG_RUN = 2;  // rounds of a block, from which on most of its packs are inside a run
constexpr int MANY_WAVES = 8;    // of blocks, of which the last one may be partly empty
constexpr int MANY_ROUNDS = 4;   // of a block, beside which its start counts little
// A launch and the clearing of the counts, in bytes that an SM moves in that time.
constexpr int64_t LAUNCH_BYTES = 98304;
constexpr int SATURATING = 3;  // blocks whose loads saturate an SM's share of the memory's bandwidth

enum class Pass {
  BOTH,    // count, then write
  COUNTS,  // stores the bits, and adds to ties
  WRITES,  // from the bits and ties
};

// One thread's item.
template <typename T, Moves MOVES, bool ALONG>
struct Item {
  static constexpr int WIDTH = WIDTH_OF<T, MOVES>;
  Spots first;
  int own, own_last;  // columns, and those of a folded problem's last row; 0 if there is no such item

  // `place`: among the lanes of all blocks.
  __device__ Item(const Problem& problem, int64_t place) {
    const int64_t item = problem.per_warp == 32 ? place : place / 32 * problem.per_warp + place % 32;
    const bool exists = item < problem.kept.axes.count;
    Spots spots[1];
    find_spots(spots, problem.kept, {exists ? item : 0});
    first = spots[0];
    const auto columns = [&](int64_t run) {
      return static_cast<int>(min(max(run - first.inner * WIDTH, int64_t{0}), int64_t{WIDTH}));
    };
    own = exists ? (ALONG ? 1 : columns(problem.run)) : 0;
    own_last = exists && !ALONG && problem.folds() ? columns(problem.last_run) : own;
  }

  // The output of column i: its number among those of the row, if columns share outputs.
  __device__ int64_t column(const Problem& problem, int i) const {
    if (!problem.shares_columns()) return i;
    const int64_t in_row = first.inner * WIDTH + i;
    const int64_t in_period = problem.folds() ? static_cast<unsigned>(in_row) % problem.period : in_row;
    return problem.repeats > 1 ? in_period / problem.repeats : in_period;
  }
  // The place in out of output i.
  __device__ int64_t output(const Problem& problem, int i) const {
    return ALONG ? first.in_out : first.in_out + column(problem, i) * problem.step;
  }

  // The values of all outputs; NaN where there is none.
  __device__ Moved<T, MOVES> outputs_from(const T* values, const Problem& problem) const {
    Moved<T, MOVES> found;
    const T none = from_float<T>(NAN);
    if constexpr (ALONG) {
      const T value = own > 0 ? values[first.in_out] : none;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) set(found, i, value);
    } else {
      if constexpr (WIDTH > 1) {
        const T* const place = values + first.in_out;
        if (own == WIDTH && problem.step == 1 && !problem.shares_columns() && skew_of(place) == 0) {
          return {*reinterpret_cast<const uint4*>(place)};
        }
      }
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) set(found, i, i < own ? values[output(problem, i)] : none);
    }
    return found;
  }

  // Along a run, packs are laid out as they are aligned in dx.
  template <int COUNT>
  __device__ void find(Unit (&units)[COUNT], const Problem& problem, int64_t number, const T* dx) const {
    const int64_t last = problem.reduced.axes.count - 1;
    int64_t numbers[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) numbers[k] = min(number + k * problem.sharing, last);
    Spots spots[COUNT];
    find_spots(spots, problem.reduced, numbers);
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const int64_t at = number + k * problem.sharing;
      Unit& unit = units[k];
      unit.in_x = first.in_x + spots[k].in_x;
      unit.in_dx = first.in_dx + spots[k].in_dx;
      int low = 0, high = at == last ? own_last : own;
      if (ALONG && MOVES == Moves::PACKS && own > 0) high = WIDTH;
      if (ALONG && MOVES == Moves::SHIFTED_LOADS) {
        const int skew = skew_of(dx + unit.in_dx);
        const int64_t from = spots[k].inner * WIDTH - skew;
        unit.in_x -= skew;
        unit.in_dx -= skew;
        high = own > 0 ? static_cast<int>(max(min(problem.run - from, int64_t{WIDTH}), int64_t{0})) : 0;
        low = from < 0 ? skew : 0;
      }
      if (at <= last && high > 0) unit.set_span(low, high);
    }
  }

  // Whether a thread's COUNT units from `number` on, which lie `sharing` apart, are whole packs of one run,
  // in which their aligned words lie, too. Most are, if runs are long. `unit` is then where the first one
  // begins.
  template <int COUNT>
  __device__ bool is_inside(Unit& unit, const Problem& problem, int64_t number, const T* dx) const {
    Spots spots[1];
    find_spots(spots, problem.reduced, {min(number, problem.reduced.axes.count - 1)});
    const int skew = skew_of(dx + first.in_dx + spots[0].in_dx);
    unit.in_x = first.in_x + spots[0].in_x - skew;
    unit.in_dx = first.in_dx + spots[0].in_dx - skew;
    const int64_t from = spots[0].inner * WIDTH - skew;
    const int64_t end = from + ((COUNT - 1) * int64_t{problem.sharing} + 2) * WIDTH;
    return own > 0 && from >= WIDTH && end <= problem.run;
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

// Blocks an SM, as registers allow.
template <Moves MOVES, Pass PASS>
constexpr int FITTING = MOVES == Moves::PACKS || PASS == Pass::WRITES ? 4 : 3;

// x, dx: addressed by the walks; out, dout, ties: by the kept one. ALONG: the contiguous axis is reduced,
// and its runs are no columns.
// marks: [blocks, rounds, THREADS], null if shared memory has the bits.
template <typename T, Moves MOVES, bool ALONG, Pass PASS>
__global__ void __launch_bounds__(THREADS, FITTING<MOVES, PASS>)
    reduction_nd_amax_backward_kernel(const T* __restrict__ x, const T* __restrict__ out,
                                      const T* __restrict__ dout, unsigned* ties,
                                      typename TieBits<T, MOVES>::Word* marks, T* __restrict__ dx,
                                      const __grid_constant__ Problem problem) {
  using Bits = TieBits<T, MOVES>;
  using Word = typename Bits::Word;
  constexpr int WIDTH = WIDTH_OF<T, MOVES>, OUTPUTS = ALONG ? 1 : WIDTH, UNITS = Bits::UNITS;
  constexpr bool SHIFTS = MOVES == Moves::SHIFTED_LOADS || MOVES == Moves::SHIFTED;
  // [OUTPUTS, items of the block]; of a folded problem [its outputs]
  __shared__ unsigned counts[PASS == Pass::WRITES ? 1 : THREADS * OUTPUTS];
  extern __shared__ uint32_t held[];
  const int items = THREADS / problem.sharing;
  const int local = ALONG ? threadIdx.x / problem.sharing : threadIdx.x % items;
  const int lane = ALONG ? threadIdx.x % problem.sharing : threadIdx.x / items;
  const Item<T, MOVES, ALONG> item(problem, static_cast<int64_t>(blockIdx.x) * items + local);
  const Overlap overlap = problem.per_warp < 32 ? Overlap::LAST_LANE : Overlap::NONE;

  const int64_t block = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  Word* const words =
      (PASS == Pass::BOTH ? reinterpret_cast<Word*>(held) : marks + block * problem.rounds * THREADS) +
      threadIdx.x;
  // All threads of a block have the same rounds, so that a warp's lanes store together. Units that are whole
  // packs inside a long run need neither spans nor bounds: use_inside(first unit, word) takes them.
  constexpr bool HAS_INSIDE = ALONG && MOVES == Moves::SHIFTED_LOADS;
  const int apart = problem.sharing * WIDTH;
  const bool has_inside = HAS_INSIDE && problem.run >= LONG_RUN * UNITS * apart;
  const auto each_round = [&](auto use_inside, auto use) {
#pragma unroll 1
    for (int round = 0; round < problem.rounds; ++round) {
      const int64_t begin = (static_cast<int64_t>(round) * gridDim.y + blockIdx.y) * UNITS * problem.sharing;
      if (begin >= problem.reduced.axes.count) break;
      Word& word = words[static_cast<int64_t>(round) * THREADS];
      if constexpr (HAS_INSIDE) {
        Unit unit;
        if (has_inside && item.template is_inside<UNITS>(unit, problem, begin + lane, dx)) {
          use_inside(unit, word);
          continue;
        }
      }
      Unit units[UNITS];
      item.find(units, problem, begin + lane, dx);
      use(units, word);
    }
  };

  Shares<T, MOVES> shares;
  const auto gradients = item.outputs_from(dout, problem);
  if constexpr (PASS == Pass::WRITES) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      shares.set_of(i, gradients[i], i < item.own || ALONG ? ties[item.output(problem, i)] : 1);
    }
  } else {
    const T* const end = x + problem.extent;
    const auto largest = item.outputs_from(out, problem);
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) counts[threadIdx.x * OUTPUTS + i] = 0;
    __syncthreads();  // waits for the zeros

    const auto slot = [&](int i) {
      return problem.folds() ? static_cast<int>(item.column(problem, i)) : i * items + local;
    };
    const bool counts_own = PASS == Pass::BOTH || local % 32 < problem.per_warp;  // else they count twice
    unsigned found = 0;
    const auto count_inside = [&](const Unit& unit, Word& word) {
      if constexpr (HAS_INSIDE) {
        InsideLoads<T, UNITS> loads;
        loads.from(x + unit.in_x, apart);
        Bits bits;
#pragma unroll
        for (int k = 0; k < UNITS; ++k) bits.add(k, Bits::equal(loads.taken(k), largest));
        word = static_cast<Word>(bits.word);
        found += bits.count();
      }
    };
    each_round(count_inside, [&](const Unit(&units)[UNITS], Word& word) {
      InFlight<T, MOVES> loads[UNITS];
#pragma unroll
      for (int k = 0; k < UNITS; ++k) loads[k].from(x, end, units[k]);
      Bits bits;
#pragma unroll
      for (int k = 0; k < UNITS; ++k) {
        uint32_t equal = Bits::equal(loads[k].taken(units[k]), largest);
        if (SHIFTS) equal &= Bits::inside(units[k].low(), units[k].high());
        bits.add(k, equal);
      }
      word = static_cast<Word>(bits.word);
      if (ALONG) {
        found += bits.count();
      } else if (bits.word != 0 && counts_own) {  // rare where many share an output
#pragma unroll
        for (int i = 0; i < OUTPUTS; ++i) {
          if (const int number = bits.count(i); number > 0) atomicAdd(&counts[slot(i)], number);
        }
      }
    });
    if (ALONG && found > 0) atomicAdd(&counts[slot(0)], found);
    __syncthreads();  // waits for the counts of all threads
    if constexpr (PASS == Pass::BOTH) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) shares.set_of(i, gradients[i], counts[slot(ALONG ? 0 : i)]);
    } else if (problem.folds()) {
      for (unsigned i = threadIdx.x; i < problem.period; i += THREADS) {
        if (counts[i] > 0) atomicAdd(&ties[i * problem.step], counts[i]);
      }
    } else if (lane == 0) {
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i) {
        const unsigned number = counts[slot(i)];
        if (number > 0) atomicAdd(&ties[item.output(problem, i)], number);
      }
    }
  }
  if constexpr (PASS != Pass::COUNTS) {
    const auto write_inside = [&](const Unit& unit, const Word& word) {
      if constexpr (HAS_INSIDE) {
        const Bits bits = {word};
#pragma unroll
        for (int k = 0; k < UNITS; ++k) {
          const Pack<T> chosen = bits.choose(k, shares.share, shares.nothing);
          __stcs(reinterpret_cast<uint4*>(dx + unit.in_dx + k * apart), chosen.words);
        }
      }
    };
    each_round(write_inside, [&](const Unit(&units)[UNITS], const Word& word) {
      const Bits bits = {word};
#pragma unroll
      for (int k = 0; k < UNITS; ++k) {
        const auto chosen = bits.choose(k, shares.share, shares.nothing);
        store_moved<MOVES>(dx, units[k], chosen, overlap, item.first.inner > 0);
      }
    });
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

// `inner`: the walk of the contiguous axis, `along` which threads share an output, or not.
Moves moves_of(const AmaxBackwardArgs& args, const Problem& problem, const Walk& inner, const Walk& other,
               int width, bool along) {
  if (inner.inner().stride != 1 || inner.inner_target() != 1 || problem.run < width) return Moves::ELEMENTS;
  const auto stride = [](const Walk& walk, int a) { return walk.axes.axis[a].stride; };
  const bool whole = problem.run % width == 0 && !problem.folds();
  if (!problem.dx_is_aligned) return along ? Moves::SHIFTED_LOADS : Moves::SHIFTED;
  return whole && are_aligned(args.x, inner, other, width, stride) ? Moves::PACKS : Moves::SHIFTED_LOADS;
}

template <typename T, Moves MOVES, bool ALONG, Pass PASS>
void launch(const AmaxBackwardArgs& args, const Problem& problem, dim3 grid, unsigned* ties, void* marks,
            int64_t shared_bytes) {
  using Word = typename TieBits<T, MOVES>::Word;
  reduction_nd_amax_backward_kernel<T, MOVES, ALONG, PASS><<<grid, THREADS, shared_bytes, args.stream>>>(
      static_cast<const T*>(args.x), static_cast<const T*>(args.out), static_cast<const T*>(args.dout), ties,
      static_cast<Word*>(marks), static_cast<T*>(args.dx), problem);
  CUDA_CHECK(cudaGetLastError());
}

int64_t outputs_of(const AmaxBackwardArgs& args) {
  int64_t outputs = 1;
  for (int axis = 0; axis < args.rank; ++axis) outputs *= args.reduced[axis] ? 1 : args.sizes[axis];
  return outputs;
}

// How many blocks share the units of a tile. A few tiles have one wave of blocks, whose work is the same;
// many have several waves, so that the last one is short.
int64_t parts_of(int64_t tiles, int64_t slots, int64_t rounds) {
  const int64_t parts = tiles * MANY_WAVES <= slots
                            ? std::min(slots / tiles, rounds)
                            : std::min(cdiv(MANY_WAVES * slots, tiles), rounds / MANY_ROUNDS);
  return std::clamp(parts, int64_t{1}, MOST_PARTS);
}

template <typename T, Moves MOVES, bool ALONG>
void launch(const AmaxBackwardArgs& args, Problem problem) {
  using Bits = TieBits<T, MOVES>;
  constexpr int WIDTH = WIDTH_OF<T, MOVES>, UNITS = Bits::UNITS;
  constexpr int SIDE_BY_SIDE = MOVES == Moves::PACKS ? LINE_OF_PACKS : 32;  // at least, down columns
  const int64_t sms = multiprocessor_count(), slots = sms * FITTING<MOVES, Pass::COUNTS>;
  const bool leads = ALONG && MOVES == Moves::SHIFTED_LOADS && !problem.dx_is_aligned;
  (ALONG ? problem.reduced : problem.kept).pack(WIDTH, leads ? WIDTH - 1 : 0);
  const int64_t items = problem.kept.axes.count, units = problem.reduced.axes.count;
  const int64_t columns =
      std::min(power_of_two_from(items), int64_t{problem.folds() ? THREADS : SIDE_BY_SIDE});
  const int64_t most_sharing = ALONG ? THREADS : THREADS / columns;
  if (MOVES == Moves::SHIFTED && items > 32) problem.per_warp = 31;
  const auto tiles_of = [&](int64_t sharing) {
    return cdiv(items, THREADS / sharing * problem.per_warp / 32);
  };
  const auto rounds_of = [&](int64_t sharing) { return cdiv(units, UNITS * sharing); };
  int64_t sharing = std::min(power_of_two_from(cdiv(units, UNITS)), most_sharing);
  // Fewer threads share an item if the last round is then less empty, and the blocks are still many.
  while (sharing > 1 && tiles_of(sharing / 2) > MANY_WAVES * slots &&
         10 * rounds_of(sharing / 2) * (sharing / 2) <= 9 * rounds_of(sharing) * sharing) {
    sharing /= 2;
  }
  problem.sharing = static_cast<int>(sharing);

  const int64_t tiles = tiles_of(sharing), rounds = rounds_of(sharing);
  constexpr int64_t ROUND_BYTES = THREADS * sizeof(typename Bits::Word);
  // The bytes of x and dx that an SM moves: in whole tiles, of which one block alone does not saturate it, or
  // evenly and with the bits, a 16th.
  const int64_t tile = 2 * units * (THREADS / sharing) * WIDTH * int64_t{sizeof(T)};
  const int64_t whole = tile * std::max(cdiv(tiles, sms), int64_t{SATURATING});
  const int64_t split = tile * tiles / sms * 17 / 16 + LAUNCH_BYTES;
  if (!problem.shares_columns() && rounds * ROUND_BYTES <= MOST_HELD_BYTES && whole <= split) {
    problem.rounds = static_cast<int>(rounds);
    const dim3 grid(static_cast<unsigned>(tiles));
    return launch<T, MOVES, ALONG, Pass::BOTH>(args, problem, grid, nullptr, nullptr, rounds * ROUND_BYTES);
  }
  const int64_t parts = parts_of(tiles, slots, rounds), outputs = outputs_of(args);
  problem.rounds = static_cast<int>(cdiv(rounds, parts));
  auto* const ties = static_cast<unsigned*>(args.memory->workspace(outputs * sizeof(unsigned)));
  void* const marks = args.memory->workspace(tiles * parts * problem.rounds * ROUND_BYTES);
  CUDA_CHECK(cudaMemsetAsync(ties, 0, outputs * sizeof(unsigned), args.stream));
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(parts));
  launch<T, MOVES, ALONG, Pass::COUNTS>(args, problem, grid, ties, marks, 0);
  launch<T, MOVES, ALONG, Pass::WRITES>(args, problem, grid, ties, marks, 0);
}

template <typename T, bool ALONG>
void launch(const AmaxBackwardArgs& args, Problem problem) {
  constexpr int SIZE = Pack<T>::SIZE;
  if constexpr (ALONG) {
    if (are_runs_columns(problem, SIZE)) {
      take_runs_for_columns(problem);
      return launch<T, false>(args, problem);
    }
  }
  const Walk& inner = ALONG ? problem.reduced : problem.kept;
  const Walk& other = ALONG ? problem.kept : problem.reduced;
  const Axis& row = problem.reduced.inner();
  const int64_t columns = problem.run;
  // Columns that are no whole packs are folded up to twice as many: shifted, 33 packs take two warps of 31.
  if (!ALONG && inner.inner().stride == 1 && inner.inner_target() == 1 && problem.kept.axes.rank == 1 &&
      problem.reduced.axes.rank == 1 && row.stride == columns && problem.reduced.inner_target() == columns &&
      columns < (columns % SIZE ? 64 : 32) * SIZE && row.size > int64_t{FOLDED_ROWS}) {
    fold(problem, SIZE, THREADS * SIZE);
  }
  const auto target = [](const Walk& walk, int a) { return walk.targets[a]; };
  problem.dx_is_aligned = are_aligned(args.dx, inner, other, SIZE, target);
  switch (moves_of(args, problem, inner, other, SIZE, ALONG)) {
    case Moves::ELEMENTS:
      return launch<T, Moves::ELEMENTS, ALONG>(args, problem);
    case Moves::PACKS:
      return launch<T, Moves::PACKS, ALONG>(args, problem);
    case Moves::SHIFTED_LOADS:
      return launch<T, Moves::SHIFTED_LOADS, ALONG>(args, problem);
    case Moves::SHIFTED:
      if constexpr (!ALONG) return launch<T, Moves::SHIFTED, ALONG>(args, problem);
  }
}

}  // namespace

void reduction_nd_amax_backward(const AmaxBackwardArgs& args) {
  Problem problem{.kept = walk_of(args, false), .reduced = walk_of(args, true), .per_warp = 32, .repeats = 1};
  problem.step = problem.kept.inner().step;
  problem.extent = extent_of(problem.kept.axes, problem.reduced.axes);
  const bool along = along_reduced(problem.kept.axes, problem.reduced.axes);
  problem.run = (along ? problem.reduced : problem.kept).inner().size;
  dispatch(args.dtype, [&](auto zero) {
    along ? launch<decltype(zero), true>(args, problem) : launch<decltype(zero), false>(args, problem);
  });
}
