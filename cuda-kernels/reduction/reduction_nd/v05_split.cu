// reduction_nd v05_split: several blocks share an output if outputs are few.
//
// Change:   every tile's units are dealt out to parts, round by round. A block writes its part's total to a
//           workspace and takes a ticket from the tile's counter; the block with the last ticket merges the
//           parts, always in the same order, and resets the counter to 0. Along the rows of a large x a
//           thread has eight loads in flight, except for argmax. Layouts that v04 left to v03 use the same
//           kernels with loads of one element.
// Why:      the statistics of 64 channels are 64 outputs for 132 SMs, and a sum over all axes is one output.
//           Parts occupy all SMs, in one launch and without atomics on values, so every run gives the same
//           bits. Parts take turns, round by round: if each were one contiguous stretch, the blocks would
//           read at hundreds of places at once, and all would wait for the slowest.
// Error:    as v04's for the elements of a part, and one more rounding for each part: at most (R / (8 parts)
//           + parts + 14) eps/2 sum|x|.
// Counter:  time stays if there are enough tiles, and falls most if there is one.
// Requires: nothing. The counters are 0 at the start and again at the end.
// Twin:     triton-kernels/reduction/reduction_nd/v05_split.py
#include <type_traits>

#include "lib/load.cuh"
#include "lib/ticket.cuh"
#include "tiling.cuh"

namespace {

constexpr int RESIDENT = 4;            // blocks an SM with LOADS
constexpr int MANY_LOADS = 2 * LOADS;  // in flight a thread, along rows of a large x
constexpr int MANY_RESIDENT = 3;       // resident blocks an SM with MANY_LOADS
constexpr int MOST = 32;               // blocks an SM of split tiles, resident or not
constexpr int ROUNDS = 4;              // at least, a block, if not all blocks are resident
constexpr int COUNTERS = ZEROED_BYTES / sizeof(unsigned);

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

// Down columns: adds this thread's share of the rows to the totals of the columns that begin at x, with LOADS
// loads in flight.
template <typename T, Access ACCESS, typename Total>
__device__ void add_down(Total (&totals)[Load<T, ACCESS>::WIDTH], const T* x, const Tiling& tiling,
                         const Share& share) {
#pragma unroll 1
  for (int64_t row = share.unit; row < share.end; row += share.round) {
    Load<T, ACCESS> loads[LOADS];
    int64_t place[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int64_t at = row + i * share.stride;
      const Offsets found = place_of(tiling.reduced, at < share.end ? at : row);
      place[i] = found.step;
      loads[i].from(x + found.offset, at < share.end);
    }
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (row + i * share.stride >= share.end) break;
#pragma unroll
      for (int j = 0; j < Load<T, ACCESS>::WIDTH; ++j) totals[j].add(loads[i][j], place[i]);
    }
  }
}

// workspace: [tiles, parts]
template <typename T, Access ACCESS, End END, int DEPTH, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v05_split_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling, float divisor,
                                  Total* workspace, unsigned* counters) {
  __shared__ Total parts[THREADS / 32];
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) / tiling.lanes;
  const int lane = threadIdx.x % tiling.lanes;
  const bool exists = output < tiling.kept.count;  // otherwise the thread only joins the shuffles
  const Offsets place = place_of(tiling.kept, exists ? output : 0);
  Total total = Total::none();
  if (exists) {
    Share share(tiling, lane, tiling.lanes, DEPTH, blockIdx.y, gridDim.y);
    const bool has_tail = END == End::TAIL && output == tiling.kept.count - 1;
    if (has_tail) share.end -= tiling.tail_units;
    add_along<T, ACCESS, DEPTH>(total, x + place.offset, tiling, share);
    if (has_tail && lane == 0 && blockIdx.y == 0) add_tail(total, x, tiling);
  }
  total = tiling.lanes == THREADS ? merge_block<THREADS>(total, parts) : merge_lanes(total, tiling.lanes);

  if (gridDim.y > 1) {  // then a tile is one output
    workspace += static_cast<int64_t>(blockIdx.x) * gridDim.y;
    if (threadIdx.x == 0) workspace[blockIdx.y] = total;
    if (!is_last(counters)) return;
    total = Total::none();
    for (int other = threadIdx.x; other < gridDim.y; other += THREADS) total.merge(workspace[other]);
    total = merge_block<THREADS>(total, parts);
  }
  if (exists && lane == 0) store<T>(total, out, place.step, divisor);
}

// The total of one of a tile's `width` columns, merged over the rows in order. parts: [rows, width], of SIZE.
template <int SIZE, typename Total>
__device__ Total merged(const Total* parts, int column, int width) {
  Total total = parts[column];
  for (int at = column + width; at < SIZE; at += width) total.merge(parts[at]);
  return total;
}

// workspace: [tiles, parts, columns of a tile]
template <typename T, Access ACCESS, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v05_split_columns_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                          float divisor, Total* workspace, unsigned* counters) {
  constexpr int WIDTH = Load<T, ACCESS>::WIDTH, SIZE = THREADS * WIDTH;
  __shared__ Total parts[SIZE];  // [rows, columns of the tile]
  const int64_t first_pack = static_cast<int64_t>(blockIdx.x) * tiling.columns;
  const int64_t pack = first_pack + threadIdx.x % tiling.columns;
  Total totals[WIDTH];
#pragma unroll
  for (Total& total : totals) total = Total::none();
  if (pack < tiling.kept.count) {
    const int rows = THREADS / tiling.columns;
    const Share share(tiling, threadIdx.x / tiling.columns, rows, LOADS, blockIdx.y, gridDim.y);
    add_down<T, ACCESS>(totals, x + place_of(tiling.kept, pack).offset, tiling, share);
  }
#pragma unroll
  for (int j = 0; j < WIDTH; ++j) parts[threadIdx.x * WIDTH + j] = totals[j];
  __syncthreads();  // waits for the totals of all rows
  const int width = tiling.columns * WIDTH;
  if (gridDim.y > 1) {
    workspace += static_cast<int64_t>(blockIdx.x) * gridDim.y * width;
    for (int column = threadIdx.x; column < width; column += THREADS) {
      workspace[static_cast<int64_t>(blockIdx.y) * width + column] = merged<SIZE>(parts, column, width);
    }
    if (!is_last(counters)) return;
  }
  // Coalesced stores: neighbouring threads write neighbouring outputs.
  for (int column = threadIdx.x; column < width; column += THREADS) {
    const int64_t its_pack = first_pack + column / WIDTH;
    if (its_pack >= tiling.kept.count) break;
    const int64_t at = place_of(tiling.kept, its_pack).step + column % WIDTH * tiling.column_step;
    Total total = gridDim.y > 1 ? workspace[column] : merged<SIZE>(parts, column, width);
#pragma unroll 4
    for (unsigned other = 1; gridDim.y > 1 && other < gridDim.y; ++other) {
      total.merge(workspace[static_cast<int64_t>(other) * width + column]);
    }
    store<T>(total, out, at, divisor);
  }
}

// Parts a tile: as many as fill the GPU, as long as each has units; 1 if the tiles fill it alone. A split
// tile needs a counter. `depth`: loads in flight a thread.
//
// Memory serves some SMs faster than others. Blocks that come and go then end closer together than blocks
// that are all resident from the start. So there are more blocks than the GPU holds at once if a thread has
// many loads, and a part is a single total.
int64_t parts_of(const Tiling& tiling, int depth, int64_t sms) {
  if (tiling.columns == 0 && tiling.lanes < THREADS) return 1;
  if (tiling.tiles >= std::min(sms * RESIDENT, int64_t{COUNTERS})) return 1;
  const int64_t round = int64_t{tiling.sharing()} * depth;
  int64_t parts = sms * RESIDENT / tiling.tiles;
  if (depth == MANY_LOADS) parts = std::min(tiling.units() / (ROUNDS * round), sms * MOST / tiling.tiles);
  return std::max(std::min(parts, cdiv(tiling.units(), round)), int64_t{1});
}

template <typename T, typename Total, typename Kernel>
void launch(const ReductionNdArgs& args, const Tiling& tiling, int64_t parts, int width, Kernel* kernel) {
  const int64_t totals = tiling.tiles * parts * width;
  auto* workspace = parts > 1 ? static_cast<Total*>(args.memory->workspace(totals * sizeof(Total))) : nullptr;
  auto* counters = parts > 1 ? static_cast<unsigned*>(args.memory->zeroed()) : nullptr;
  const dim3 grid(tiling.tiles, parts);
  kernel<<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), args.out, tiling, args.divisor(),
                                            workspace, counters);
}

template <typename T, Access ACCESS, typename Total>
void launch(const ReductionNdArgs& args, const Tiling& tiling, int64_t sms) {
  const auto along = [&](auto depth) {
    auto* kernel = reduction_nd_v05_split_kernel<T, ACCESS, End::PACKS, depth, Total>;
    if constexpr (ACCESS == Access::PACKS) {
      if (tiling.tail > 0) kernel = reduction_nd_v05_split_kernel<T, ACCESS, End::TAIL, depth, Total>;
    }
    launch<T, Total>(args, tiling, parts_of(tiling, depth, sms), 1, kernel);
  };
  if (tiling.columns) {
    launch<T, Total>(args, tiling, parts_of(tiling, LOADS, sms), tiling.columns * Load<T, ACCESS>::WIDTH,
                     reduction_nd_v05_split_columns_kernel<T, ACCESS, Total>);
    return;
  }
  // MANY_LOADS take more registers, so an SM holds one block less. That pays if threads have as many units to
  // load, and all resident blocks have several rounds. Not for argmax, whose indices need the registers.
  if constexpr (ACCESS == Access::PACKS && !std::is_same_v<Total, ArgMax>) {
    const int64_t at_once = sms * MANY_RESIDENT * THREADS * MANY_LOADS;
    const bool deep = tiling.units() > int64_t{tiling.lanes} * LOADS;
    if (deep && tiling.kept.count * tiling.units() >= ROUNDS * at_once)
      return along(std::integral_constant<int, MANY_LOADS>{});
  }
  along(std::integral_constant<int, LOADS>{});
}

}  // namespace

void reduction_nd_v05_split(const ReductionNdArgs& args) {
  const int64_t sms = multiprocessor_count();
  dispatch_totals(args, [&](auto zero, auto total) {
    using T = decltype(zero);
    using Total = decltype(total);
    const Tiling tiling = tiling_of<T>(args, sms);
    if (tiling.tiles == 0) return;
    tiling.wide ? launch<T, Access::PACKS, Total>(args, tiling, sms)
                : launch<T, Access::ELEMENTS, Total>(args, tiling, sms);
  });
  CUDA_CHECK(cudaGetLastError());
}
