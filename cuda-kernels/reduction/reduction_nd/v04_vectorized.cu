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
#include "lib/load_if.cuh"
#include "tiling.cuh"

void reduction_nd_v03_by_layout(const ReductionNdArgs& args);

namespace {

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
      packs[i].words = make_uint4(0, 0, 0, 0);
      load_if(first[i] < tiling.run, run + first[i], packs[i].words);
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
      const Offsets found = place_of(tiling.reduced, at < share.end ? at : row);
      place[i] = found.step;
      packs[i].words = make_uint4(0, 0, 0, 0);
      load_if(at < share.end, x + found.offset, packs[i].words);
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

template <typename T, End END, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v04_vectorized_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                       float divisor) {
  __shared__ Total parts[THREADS / 32];
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / tiling.lanes;
  const int lane = threadIdx.x % tiling.lanes;
  const bool exists = output < tiling.kept.count;  // otherwise the thread only joins the shuffles
  const Offsets place = place_of(tiling.kept, exists ? output : 0);
  Total total = Total::none();
  if (exists) {
    Share share(tiling, lane, tiling.lanes, LOADS);
    const bool has_tail = END == End::TAIL && output == tiling.kept.count - 1;
    if (has_tail) share.end -= tiling.tail_units;
    add_along(total, x + place.offset, tiling, share);
    if (has_tail && lane == 0) add_tail(total, x, tiling);
  }
  total = tiling.lanes == THREADS ? merge_block<THREADS>(total, parts) : merge_lanes(total, tiling.lanes);
  if (exists && lane == 0) store<T>(total, out, place.step, divisor);
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
             Share(tiling, threadIdx.x / tiling.columns, THREADS / tiling.columns, LOADS));
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
    store<T>(merged<THREADS * SIZE>(parts, column, width), out, at, divisor);
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
    const auto kernel = tiling.columns    ? reduction_nd_v04_vectorized_columns_kernel<T, Total>
                        : tiling.tail > 0 ? reduction_nd_v04_vectorized_kernel<T, End::TAIL, Total>
                                          : reduction_nd_v04_vectorized_kernel<T, End::PACKS, Total>;
    kernel<<<tiling.tiles, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), args.out, tiling,
                                                      args.divisor());
  });
  CUDA_CHECK(cudaGetLastError());
}
