// The gradient of a maximum over any axes: dx = dout / ties where x is the maximum, else 0.
//
// Two passes over x: the first counts the elements that equal their maximum, the second writes. Threads lie
// along the axis that is contiguous in memory. If that is a reduced one, up to 32 lanes share an output; if
// it is a kept one, a thread has the outputs of a pack and walks down the rows. Outputs that are few are
// split into parts, whose counts meet by atomic additions of integers: these give the same sum in any order.
// Twin: triton-kernels/reduction/reduction_nd/amax_backward.py
#include "amax_backward.h"

#include "lib/walk.cuh"
#include "merged_axes.h"

namespace {

constexpr int THREADS = 256;
constexpr int RESIDENT = 8;  // blocks an SM
template <int WIDTH>
constexpr int UNITS = WIDTH > 1 ? 4 : 6;  // loads in flight a thread
constexpr int64_t MOST_PARTS = 65535;     // of a grid's second axis

// The kept or the reduced axes, merged where they continue in x, dx and out alike; the last has x's least
// stride. An axis' step is the one in out, 0 if the axis is reduced.
struct Walk {
  Axes axes;
  int64_t targets[MOST_AXES];  // in elements of dx

  const Axis& inner() const { return axes.inner(); }
  int64_t inner_target() const { return targets[axes.rank - 1]; }

  // Counts packs of `width` elements along the inner axis, whose size is a multiple of that.
  void pack(int width) {
    const Axis single = inner();
    axes.set_inner(Axis(single.size / width, single.stride * width, single.step * width));
    targets[axes.rank - 1] *= width;
  }
};

Walk walk_of(const AmaxBackwardArgs& args, bool reduced) {
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
};

__device__ Spots spots_of(const Walk& walk, int64_t index) {
  const Axis& outermost = walk.axes.axis[0];
  if (walk.axes.rank == 1) {
    return {index * outermost.stride, index * walk.targets[0], index * outermost.step};
  }
  Spots spots = {};
  for (int a = walk.axes.rank - 1; a >= 0; --a) {
    const Axis& axis = walk.axes.axis[a];
    const int64_t at = a > 0 ? split_off(index, axis) : index;
    spots.in_x += at * axis.stride;
    spots.in_dx += at * walk.targets[a];
    spots.in_out += at * axis.step;
  }
  return spots;
}

// Neighbouring elements, which one access moves.
template <typename T, int WIDTH>
struct alignas(WIDTH * sizeof(T)) Neighbours {
  T of[WIDTH];
};

struct Problem {
  Walk kept, reduced;  // that of the contiguous axis counts packs
  int64_t step;        // in out, between a thread's outputs
  int lanes;           // that share an output: a power of two up to 32
};

// x, dx: addressed by the walks; out, dout, ties: by the kept one. ALONG: the contiguous axis is reduced.
template <typename T, int WIDTH, bool ALONG, bool WRITES>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_amax_backward_kernel(const T* __restrict__ x, const T* __restrict__ out,
                                      const T* __restrict__ dout, unsigned* ties, T* __restrict__ dx,
                                      const __grid_constant__ Problem problem) {
  using Row = Neighbours<T, WIDTH>;
  constexpr int OUTPUTS = ALONG ? 1 : WIDTH;
  const int64_t item = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / problem.lanes;
  const int lane = threadIdx.x % problem.lanes;
  const bool exists = item < problem.kept.axes.count;  // otherwise the thread only joins the shuffles
  const Spots first = spots_of(problem.kept, exists ? item : 0);
  float largest[OUTPUTS];
  T share[OUTPUTS], nothing[OUTPUTS];
  unsigned found[OUTPUTS] = {};
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) {
    const int64_t at = first.in_out + i * problem.step;
    largest[i] = to_float(out[at]);
    if constexpr (WRITES) {
      share[i] = from_float<T>(to_float(dout[at]) / static_cast<float>(ties[at]));
      nothing[i] = from_float<T>(to_float(share[i]) * 0.0f);  // NaN where nothing equals a maximum of NaN
    }
  }

  const int64_t units = exists ? problem.reduced.axes.count : 0;
  const int64_t stride = static_cast<int64_t>(gridDim.y) * problem.lanes;
  const int64_t start = static_cast<int64_t>(blockIdx.y) * problem.lanes + lane;
  for (int64_t unit = start; unit < units; unit += UNITS<WIDTH> * stride) {
    // All addresses, then all loads, so that these are in flight together. Past the end the last unit is read
    // again, and written again, since the compiler moves a load into the branch that alone uses it.
    Spots spots[UNITS<WIDTH>];
    Row values[UNITS<WIDTH>];
#pragma unroll
    for (int k = 0; k < UNITS<WIDTH>; ++k) {
      spots[k] = spots_of(problem.reduced, min(unit + k * stride, units - 1));
    }
#pragma unroll
    for (int k = 0; k < UNITS<WIDTH>; ++k) {
      values[k] = *reinterpret_cast<const Row*>(x + first.in_x + spots[k].in_x);
    }
#pragma unroll
    for (int k = 0; k < UNITS<WIDTH>; ++k) {
      const bool again = unit + k * stride >= units;
      Row gradients;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        const int output = ALONG ? 0 : i;
        const bool is_largest = to_float(values[k].of[i]) == largest[output];
        if constexpr (WRITES) {
          gradients.of[i] = is_largest ? share[output] : nothing[output];
        } else {
          found[output] += is_largest && !again;
        }
      }
      if constexpr (WRITES) *reinterpret_cast<Row*>(dx + first.in_dx + spots[k].in_dx) = gradients;
    }
  }

  if constexpr (!WRITES) {
    if constexpr (ALONG) {
      for (int other = problem.lanes / 2; other > 0; other /= 2) {
        found[0] += __shfl_xor_sync(~0u, found[0], other);
      }
    }
#pragma unroll
    for (int i = 0; i < OUTPUTS; ++i) {
      if (exists && lane == 0 && found[i] > 0) atomicAdd(&ties[first.in_out + i * problem.step], found[i]);
    }
  }
}

// True if x and dx can be accessed by packs of `width` along the inner axis of `inner`.
bool takes_packs(const AmaxBackwardArgs& args, const Walk& inner, const Walk& other, int width) {
  if (inner.inner().stride != 1 || inner.inner_target() != 1 || inner.inner().size % width != 0) return false;
  if (reinterpret_cast<uintptr_t>(args.x) % 16 || reinterpret_cast<uintptr_t>(args.dx) % 16) return false;
  for (const Walk* walk : {&inner, &other}) {
    for (int a = 0; a < walk->axes.rank - (walk == &inner); ++a) {
      if (walk->axes.axis[a].stride % width || walk->targets[a] % width) return false;
    }
  }
  return true;
}

template <typename T, int WIDTH, bool ALONG>
void launch(const AmaxBackwardArgs& args, Problem problem) {
  (ALONG ? problem.reduced : problem.kept).pack(WIDTH);
  const int64_t units = problem.reduced.axes.count;
  problem.lanes =
      ALONG ? static_cast<int>(std::min(power_of_two_from(cdiv(units, UNITS<WIDTH>)), int64_t{32})) : 1;
  const int64_t blocks = cdiv(problem.kept.axes.count * problem.lanes, THREADS);
  const int64_t parts = std::min({multiprocessor_count() * int64_t{RESIDENT} / blocks,
                                  cdiv(units, int64_t{problem.lanes} * UNITS<WIDTH>), MOST_PARTS});
  const dim3 grid(blocks, std::max(parts, int64_t{1}));
  const auto run = [&](auto* kernel) {
    kernel<<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), static_cast<const T*>(args.out),
                                              static_cast<const T*>(args.dout), args.ties,
                                              static_cast<T*>(args.dx), problem);
  };
  run(reduction_nd_amax_backward_kernel<T, WIDTH, ALONG, false>);
  run(reduction_nd_amax_backward_kernel<T, WIDTH, ALONG, true>);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void reduction_nd_amax_backward(const AmaxBackwardArgs& args) {
  Problem problem{.kept = walk_of(args, false), .reduced = walk_of(args, true), .step = 0, .lanes = 1};
  problem.step = problem.kept.inner().step;
  const bool along = along_reduced(problem.kept.axes, problem.reduced.axes);
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int WIDTH = Pack<T>::SIZE;
    if (along) {
      const bool wide = takes_packs(args, problem.reduced, problem.kept, WIDTH);
      wide ? launch<T, WIDTH, true>(args, problem) : launch<T, 1, true>(args, problem);
    } else {
      const bool wide = takes_packs(args, problem.kept, problem.reduced, WIDTH);
      wide ? launch<T, WIDTH, false>(args, problem) : launch<T, 1, false>(args, problem);
    }
  });
}
