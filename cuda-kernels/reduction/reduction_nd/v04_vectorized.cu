// reduction_nd v04_vectorized: loads of 16 bytes in both directions, with four of a thread in flight.
//
// Change:   along a reduced axis, a lane loads packs of its output's runs; a run that does not start at a
//           multiple of 16 bytes has a ragged first and last pack. Down columns, a thread has as many
//           neighbouring columns as a pack holds. The threads of a block are divided between columns and rows
//           by the sizes of both.
// Why:      one load instruction brings eight bf16 values instead of one. By Little's law the bytes in flight
//           set the rate, and a thread has 64 of them before it waits.
// Error:    along rows at most (R / (8 lanes) + 14) eps/2 sum|x|, down columns (R / 8 + 8) eps/2 sum|x|.
// Counter:  time falls along rows, and dram_share rises. Down 4096 columns the tiles are only 16, fewer than
//           SMs, and the time rises, which v05 mends.
// Requires: nothing.
// Routes:   along rows: this kernel if runs are contiguous and hold a pack, or four packs if misaligned
//           down columns: this kernel if every row of columns is a whole number of aligned packs
//           else: v03's kernels
// Twin:     triton-kernels/reduction/reduction_nd/v04_vectorized.py
#include <algorithm>
#include <limits>

#include "totals.cuh"
#include "walk.cuh"

void reduction_nd_v03_by_layout(const ReductionNdArgs& args);

namespace {

constexpr int THREADS = 256;
constexpr int LOADS = 4;  // in flight a thread

// A predicate instead of a branch, because the compiler waits for loads before a branch. Evict-first (.cs),
// since x is read once.
template <typename T>
__device__ void load_if(bool wanted, const T* place, Pack<T>& pack) {
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

// The division of a problem among blocks of THREADS threads.
//
// - Along a reduced axis (columns == 0): an output's elements are counted in units, the packs of its runs. A
//   run is the innermost axis's `run` elements; it may start anywhere, so its first and last pack may be
//   ragged.
// - Down columns: a unit is a row, and kept's innermost axis counts packs of columns.
struct Tiling {
  Axes kept, reduced;  // reduced's innermost axis counts units
  int64_t run;
  int64_t column_step;  // between a pack's neighbouring columns, in out
  bool wide;            // whether packs can be loaded
  int lanes;            // threads an output: a power of two up to 32, or all of the block
  int columns;          // threads side by side, a power of two, each with the columns of a pack
  int64_t tiles;        // blocks
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

// The units of an output that one of `sharing` threads takes: LOADS of them in a round, each a thread's width
// apart.
struct Share {
  int64_t unit, end, round;
  int stride;

  __device__ Share(const Tiling& tiling, int own, int sharing)
      : unit(own), end(tiling.reduced.count), round(static_cast<int64_t>(LOADS) * sharing), stride(sharing) {}
};

// Along a reduced axis: adds this thread's share of an output's elements to its total.
template <typename T, typename Total>
__device__ void add_along(Total& total, const T* x, const Tiling& tiling, const Share& share) {
  constexpr int SIZE = Pack<T>::SIZE;
  const Axis& inner = tiling.reduced.axis[tiling.reduced.rank - 1];
#pragma unroll 1  // or the compiler unrolls rounds, too, and more than LOADS loads are in flight
  for (int64_t unit = share.unit; unit < share.end; unit += share.round) {
    Pack<T> packs[LOADS];
    int64_t first[LOADS];  // element within its run; at least the run's size if there is nothing to add
    int64_t place[LOADS];  // argmax's index of the run's first element
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int64_t at = unit + i * share.stride;
      const Spot spot = spot_of(tiling.reduced, at < share.end ? at : unit);
      const T* run = x + spot.outer.offset;
      const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(run) % 16 / sizeof(T));
      first[i] = at < share.end ? spot.inner * SIZE - skew : tiling.run;
      place[i] = spot.outer.step;
      load_if(first[i] < tiling.run, run + first[i], packs[i]);
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (first[i] >= 0 && first[i] + SIZE <= tiling.run) {
        total.add(packs[i], place[i] + first[i] * inner.step, inner.step);
      } else {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
          const int64_t at = first[i] + j;
          if (at >= 0 && at < tiling.run) total.add(packs[i][j], place[i] + at * inner.step);
        }
      }
    }
  }
}

// Down columns: adds this thread's share of the rows to the totals of the columns that begin at x.
template <typename T, typename Total>
__device__ void add_down(Total (&totals)[Pack<T>::SIZE], const T* x, const Tiling& tiling,
                         const Share& share) {
#pragma unroll 1
  for (int64_t row = share.unit; row < share.end; row += share.round) {
    Pack<T> packs[LOADS];
    int64_t place[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int64_t at = row + i * share.stride;
      const Place found = place_of(tiling.reduced, at < share.end ? at : row);
      place[i] = found.step;
      load_if(at < share.end, x + found.offset, packs[i]);
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (row + i * share.stride >= share.end) break;
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) totals[j].add(packs[i][j], place[i]);
    }
  }
}

// The total of one of a tile's `width` columns, merged over the rows in order. parts: [rows, width], of SIZE.
template <int SIZE, typename Total>
__device__ Total merged(const Total* parts, int column, int width) {
  Total total = parts[column];
  for (int at = column + width; at < SIZE; at += width) total.merge(parts[at]);
  return total;
}

template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v04_vectorized_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                       float divisor) {
  __shared__ Total parts[THREADS / 32];
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / tiling.lanes;
  const int lane = threadIdx.x % tiling.lanes;
  const bool exists = output < tiling.kept.count;  // otherwise the thread only joins the shuffles
  const Place place = place_of(tiling.kept, exists ? output : 0);
  Total total = Total::none();
  if (exists) add_along(total, x + place.offset, tiling, Share(tiling, lane, tiling.lanes));
  total = tiling.lanes == THREADS ? merge_block<THREADS>(total, parts) : merge_lanes(total, tiling.lanes);
  if (exists && lane == 0) total.template store<T>(out, place.step, divisor);
}

template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v04_vectorized_columns_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                               float divisor) {
  constexpr int SIZE = Pack<T>::SIZE;
  __shared__ Total parts[THREADS * SIZE];  // [rows, columns of the tile]
  const int64_t first_pack = static_cast<int64_t>(blockIdx.x) * tiling.columns;
  const int64_t pack = first_pack + threadIdx.x % tiling.columns;
  Total totals[SIZE];
#pragma unroll
  for (Total& total : totals) total = Total::none();
  if (pack < tiling.kept.count) {
    add_down(totals, x + place_of(tiling.kept, pack).offset, tiling,
             Share(tiling, threadIdx.x / tiling.columns, THREADS / tiling.columns));
  }
#pragma unroll
  for (int j = 0; j < SIZE; ++j) parts[threadIdx.x * SIZE + j] = totals[j];
  __syncthreads();  // waits for the totals of all rows
  // Coalesced stores: neighbouring threads write neighbouring outputs.
  const int width = tiling.columns * SIZE;
  for (int column = threadIdx.x; column < width; column += THREADS) {
    const int64_t its_pack = first_pack + column / SIZE;
    if (its_pack >= tiling.kept.count) break;
    const int64_t at = place_of(tiling.kept, its_pack).step + column % SIZE * tiling.column_step;
    merged<THREADS * SIZE>(parts, column, width).template store<T>(out, at, divisor);
  }
}

}  // namespace

void reduction_nd_v04_vectorized(const ReductionNdArgs& args) {
  const int64_t sms = multiprocessor_count();
  dispatch_totals(args, [&](auto zero, auto total) {
    using T = decltype(zero);
    using Total = decltype(total);
    const Tiling tiling = tiling_of<T>(args, sms);
    if (tiling.tiles == 0) return;
    if (!tiling.wide) return reduction_nd_v03_by_layout(args);
    const auto kernel = tiling.columns ? reduction_nd_v04_vectorized_columns_kernel<T, Total>
                                       : reduction_nd_v04_vectorized_kernel<T, Total>;
    kernel<<<tiling.tiles, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), args.out, tiling,
                                                      args.divisor());
  });
  CUDA_CHECK(cudaGetLastError());
}
