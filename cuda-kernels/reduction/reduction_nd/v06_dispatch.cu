// reduction_nd v06_dispatch: columns that are no whole packs, a lane a column, with more loads in flight.
//
// Change:   down columns that are no whole packs in every row, a lane has a column, and sixteen loads of
//           single elements in flight, each a fixed distance behind the one before. A tile has as many
//           columns as fill a block, so those of narrow rows are whole rows side by side; threads that
//           share its rows merge by a tree. Few columns of whole packs are divided alike. If the reduced
//           axes are several, a pack of neighbouring columns is shifted together from the two aligned
//           words that it spans; so it is in wide rows of half precision. Runs of a few elements, or of a few
//           ragged packs, that lie side by side with those of other outputs are columns, too, whose totals a
//           second launch merges. Many columns of whole packs and few rows have a thread each pack. Argmax
//           down columns keeps numbers of rows instead of indices. Very many outputs of some thousand packs,
//           for argmax of 32 or more, have a warp each. Everything else goes to v05's kernels.
// Why:      the bytes in flight set the rate, by Little's law: v05's four loads of one fp16 element are 8
//           bytes a thread, where a thread of aligned columns has 64. And v05 finds the place of each load
//           anew. Rows of one axis are a stride apart: two additions and a load are less than shifting
//           packs takes.
// Error:    as v05's; of R rows that a thread adds alone, at most (R / 16 + 22) eps/2 sum|x| in lanes of one
//           column, and R eps/2 sum|x| where it has a pack of columns; runs as columns add their r totals one
//           after the other, at most r eps/2 sum|x| more.
// Counter:  at the bench cases, whose columns are whole packs, nothing changes; the time falls down columns
//           of a matrix whose rows lie an odd number of elements apart.
// Requires: nothing. The counters are 0 at the start and again at the end.
// Routes:   see route_of
// Source:   layer_norm's v12, for the shifted packs
// Twin:     triton-kernels/reduction/reduction_nd/v06_dispatch.py
#include <type_traits>

#include "counted_columns.cuh"
#include "lane_columns.cuh"
#include "warp_rows.cuh"

void reduction_nd_v05_split(const ReductionNdArgs& args);

namespace {

// In flight a thread, and blocks an SM: single elements, and shifted packs. Argmax has fewer, since each load
// needs the index of its row in registers.
template <typename Total>
constexpr bool HAS_PLACES = std::is_same_v<Total, ArgMax>;
constexpr int MANY_NARROW = 16;
template <typename Total>
constexpr int NARROW_LOADS = HAS_PLACES<Total> ? MANY_NARROW / 2 : MANY_NARROW;
template <typename Total>
constexpr int NARROW_RESIDENT = HAS_PLACES<Total> ? RESIDENT - 1 : RESIDENT;
template <typename Total>
constexpr int SHIFTED_RESIDENT = HAS_PLACES<Total> ? 2 : 3;

constexpr int LANE_LOADS = 16, FEW_LANE_LOADS = 8;  // of single elements
template <Access ACCESS, int DEPTH>
constexpr int LANE_RESIDENT = ACCESS == Access::PACKS ? RESIDENT
                              : DEPTH == LANE_LOADS   ? 5
                                                      : 6;

enum class By {
  V05,         // v05's kernels
  LANES,       // single elements of columns, a lane a column, LANE_LOADS at once
  PACK_LANES,  // packs of few columns in tiles that they fill
  SHIFTED,     // packs of columns, shifted together
  NARROW,      // single elements of columns, NARROW_LOADS<Total> at once
  RUNS,        // short runs, or ragged ones of some packs, as columns, and their totals
  SHORT,       // all rows of a pack of columns by one thread
  COUNTED,     // argmax by packs of columns, with numbers of rows
  WARPS,       // a warp an output of some thousand whole packs, for argmax of 32 or more
};

// For columns whose rows are several axes and that are no whole packs; the first line that fits counts.
struct Route {
  int64_t neighbours;  // at least, of columns in memory, in packs
  int64_t loads;       // at least, of a thread that takes single elements
  By by;
};
constexpr Route ROUTES[] = {
    {1, 0, By::SHIFTED},
    {0, MANY_NARROW, By::NARROW},
    {0, 0, By::V05},  // the other loads would bring nothing
};

constexpr int64_t SHORT_ROWS = 128;   // at most, but for argmax, whose totals are dear to merge
constexpr int64_t SHORT_PACKS = 384;  // of columns an SM, at least
constexpr int64_t SECTOR_PACKS = 2;   // that neighbouring threads read at least
constexpr int64_t LEAST_ROWS = 48;    // that pay for a place in x and in out of every narrow column
constexpr int64_t FEW_PACKS = 128;    // of columns: fewer leave most of v05's tiles to very many parts
// Of neighbouring columns of narrow elements: so many fill whole blocks, and single elements are dear.
constexpr int64_t MANY_PACKS = 768;
constexpr int SHORT_RESIDENT = 5;  // blocks an SM
constexpr int COUNTED_RESIDENT = 3;
constexpr int SHORT_LOADS = 8, SHORT_SHIFTED_LOADS = 4;  // in flight a thread

// Whether rows can be counted in the place of indices: they come in the order of these.
bool are_rows_counted(const Tiling& tiling) { return tiling.reduced.rank == 1 && tiling.units() < INT32_MAX; }

// Many columns of few rows, by packs: whole ones, or shifted ones of narrow elements, of which a lane's place
// would cost more than its rows.
template <typename T, typename Total>
bool are_columns_short(const Tiling& tiling, int64_t sms) {
  const Axis& inner = tiling.kept.inner();
  const bool packs = tiling.wide || (sizeof(T) < 4 && inner.stride == 1 && tiling.units() < LEAST_ROWS);
  const bool few = HAS_PLACES<Total> ? are_rows_counted(tiling) : tiling.units() <= SHORT_ROWS;
  if (tiling.columns == 0 || !packs || !few) return false;
  const ShiftedTiling by_packs = short_tiling_of<T>(tiling);
  // All rows in flight at once share lines in L1, whose parts other threads read; more rows need whole lines.
  const bool at_once = tiling.wide && tiling.units() <= SHORT_LOADS;
  const int64_t side_by_side = at_once ? SECTOR_PACKS : LINE_PACKS;
  return by_packs.kept.inner().size >= side_by_side && by_packs.kept.count >= SHORT_PACKS * sms;
}

// Neighbouring columns, in packs.
template <typename T>
int64_t neighbours_of(const Tiling& tiling) {
  const Axis& inner = tiling.kept.inner();
  return inner.stride == 1 ? inner.size / Pack<T>::SIZE : 0;
}

// Whether single elements serve columns of one reduced axis best that are no whole packs.
template <typename T>
bool are_elements_best(const Tiling& tiling) {
  return sizeof(T) >= 4 || neighbours_of<T>(tiling) < MANY_PACKS;
}

template <typename T, typename Total>
By route_of(const Tiling& tiling, int64_t sms) {
  const bool runs = !HAS_PLACES<Total> && are_runs_columns<T>(tiling);
  if (runs && tiling.kept.count * tiling.run >= Pack<T>::SIZE) return By::RUNS;
  if (tiling.columns == 0) {
    return are_rows_by_warp<T, Total>(tiling, sms) ? By::WARPS : By::V05;
  }
  if (are_columns_short<T, Total>(tiling, sms)) return By::SHORT;
  const bool few = tiling.wide && tiling.kept.count < FEW_PACKS;
  if (HAS_PLACES<Total>) {
    if (are_rows_counted(tiling)) return tiling.wide && !few ? By::COUNTED : By::LANES;
  } else if (tiling.reduced.rank == 1) {
    if (few) return By::PACK_LANES;
    if (!tiling.wide && are_elements_best<T>(tiling)) return By::LANES;
  }
  if (tiling.wide) return By::V05;
  for (const Route& route : ROUTES) {
    const bool many = neighbours_of<T>(tiling) >= route.neighbours;
    if (many && tiling.units() >= route.loads * tiling.sharing()) return route.by;
  }
  return By::V05;
}

template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS, NARROW_RESIDENT<Total>)
    reduction_nd_v06_dispatch_columns_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                             float divisor, Total* workspace, unsigned* counters) {
  reduce_columns<T, Straight<T>, NARROW_LOADS<Total>>(x, out, tiling, divisor, workspace, counters);
}

template <typename T, typename Out, typename Total>
__global__ void __launch_bounds__(THREADS, SHIFTED_RESIDENT<Total>)
    reduction_nd_v06_dispatch_shifted_kernel(const T* x, void* out,
                                             const __grid_constant__ ShiftedTiling tiling, float divisor,
                                             Total* workspace, unsigned* counters) {
  reduce_columns<T, Shifted<T>, LOADS, Out>(x, out, tiling, divisor, workspace, counters);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, COUNTED_RESIDENT)
    reduction_nd_v06_dispatch_counted_kernel(const T* x, void* out,
                                             const __grid_constant__ ShiftedTiling tiling, float divisor,
                                             ArgMax* workspace, unsigned* counters) {
  reduce_columns<T, Counted<T>, LOADS>(x, out, tiling, divisor, workspace, counters);
}

template <typename T, Access ACCESS, int DEPTH, typename Out, typename Total>
__global__ void __launch_bounds__(THREADS, LANE_RESIDENT<ACCESS, DEPTH>)
    reduction_nd_v06_dispatch_lanes_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                           float divisor, Total* workspace, unsigned* counters) {
  reduce_lanes<T, ACCESS, DEPTH, Out>(x, out, tiling, divisor, workspace, counters);
}

template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v06_dispatch_runs_kernel(const float* totals, void* out, int64_t outputs, int run,
                                          float divisor) {
  merge_runs<T, Total>(totals, out, outputs, run, divisor);
}

template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS, ROW_RESIDENT)
    reduction_nd_v06_dispatch_rows_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                          float divisor) {
  if constexpr (HAS_PLACES<Total>) {
    find_argmax_by_warp(x, static_cast<int64_t*>(out), tiling);
  } else {
    reduce_rows_by_warp<T, Total>(x, out, tiling, divisor);
  }
}

template <typename T, typename Words, int DEPTH, typename Total>
__global__ void __launch_bounds__(SHORT_THREADS, SHORT_RESIDENT)
    reduction_nd_v06_dispatch_short_kernel(const T* x, void* out,
                                           const __grid_constant__ ShiftedTiling tiling, float divisor) {
  reduce_short_columns<T, Words, DEPTH, Total>(x, out, tiling, divisor);
}

// Parts a tile: as many as fill the GPU, as long as each has a round of loads; a split tile needs a counter.
int64_t parts_of(const Tiling& tiling, int loads, int64_t resident) {
  if (tiling.tiles >= std::min(resident, int64_t{COUNTERS})) return 1;
  const int64_t round = int64_t{tiling.sharing()} * loads;
  return std::max(std::min(resident / tiling.tiles, cdiv(tiling.units(), round)), int64_t{1});
}

// `width`: columns of a thread.
template <typename T, typename Total, typename Layout, typename Kernel>
void launch(const ReductionNdArgs& args, const Layout& tiling, int64_t parts, int width, Kernel* kernel,
            void* out, float divisor) {
  const int64_t totals = tiling.tiles * parts * tiling.columns * width;
  auto* workspace = parts > 1 ? static_cast<Total*>(args.memory->workspace(totals * sizeof(Total))) : nullptr;
  auto* counters = parts > 1 ? static_cast<unsigned*>(args.memory->zeroed()) : nullptr;
  const dim3 grid(tiling.tiles, parts);
  kernel<<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), out, tiling, divisor, workspace,
                                            counters);
  CUDA_CHECK(cudaGetLastError());
}

template <typename T, typename Total>
void launch_narrow(const ReductionNdArgs& args, const Tiling& tiling, int64_t sms, float divisor) {
  const int64_t parts = parts_of(tiling, NARROW_LOADS<Total>, sms * NARROW_RESIDENT<Total>);
  launch<T, Total>(args, tiling, parts, 1, reduction_nd_v06_dispatch_columns_kernel<T, Total>, args.out,
                   divisor);
}

template <typename T, typename Total, typename Out = T>
void launch_shifted(const ReductionNdArgs& args, const Tiling& narrow, int64_t sms, void* out,
                    float divisor) {
  const int64_t resident = sms * SHIFTED_RESIDENT<Total>;
  const ShiftedTiling tiling = shifted_tiling_of<T>(narrow, LOADS, resident);
  const int64_t parts = parts_of(tiling, LOADS, resident);
  launch<T, Total>(args, tiling, parts, Pack<T>::SIZE,
                   reduction_nd_v06_dispatch_shifted_kernel<T, Out, Total>, out, divisor);
}

template <typename T, typename Total>
void launch_short(const ReductionNdArgs& args, const Tiling& columns, float divisor) {
  const ShiftedTiling tiling = short_tiling_of<T>(columns);
  const auto kernel =
      columns.wide ? reduction_nd_v06_dispatch_short_kernel<T, AlignedLoad<T>, SHORT_LOADS, Total>
                   : reduction_nd_v06_dispatch_short_kernel<T, ShiftedLoad<T>, SHORT_SHIFTED_LOADS, Total>;
  kernel<<<static_cast<unsigned>(cdiv(tiling.kept.count, SHORT_THREADS)), SHORT_THREADS, 0, args.stream>>>(
      static_cast<const T*>(args.x), args.out, tiling, divisor);
  CUDA_CHECK(cudaGetLastError());
}

template <typename T, typename Total>
void launch_rows_by_warp(const ReductionNdArgs& args, const Tiling& tiling, float divisor) {
  reduction_nd_v06_dispatch_rows_kernel<T, Total>
      <<<static_cast<unsigned>(cdiv(tiling.kept.count, THREADS / 32)), THREADS, 0, args.stream>>>(
          static_cast<const T*>(args.x), args.out, tiling, divisor);
  CUDA_CHECK(cudaGetLastError());
}

template <typename T>
void launch_counted(const ReductionNdArgs& args, const ShiftedTiling& tiling, int64_t sms) {
  const int64_t parts = parts_of(tiling, LOADS, sms * COUNTED_RESIDENT);
  launch<T, ArgMax>(args, tiling, parts, Pack<T>::SIZE, reduction_nd_v06_dispatch_counted_kernel<T>, args.out,
                    args.divisor());
}

template <typename T, typename Total, Access ACCESS, typename Out = T>
void launch_lanes(const ReductionNdArgs& args, const Tiling& columns, int64_t sms, void* out, float divisor) {
  constexpr int WIDTH = Load<T, ACCESS>::WIDTH, MANY = ACCESS == Access::PACKS ? LOADS : LANE_LOADS;
  const LaneLimits limits = {
      .loads = MANY, .bytes = WIDTH * sizeof(T), .resident = sms * LANE_RESIDENT<ACCESS, MANY>};
  const Tiling tiling = lane_tiling_of(columns, limits);
  auto* kernel = reduction_nd_v06_dispatch_lanes_kernel<T, ACCESS, MANY, Out, Total>;
  if constexpr (ACCESS == Access::ELEMENTS) {
    const bool few = tiling.units() <= int64_t{FEW_LANE_LOADS} * tiling.sharing();
    if (few) kernel = reduction_nd_v06_dispatch_lanes_kernel<T, ACCESS, FEW_LANE_LOADS, Out, Total>;
  }
  launch<T, Total>(args, tiling, lane_parts_of(tiling, limits), WIDTH, kernel, out, divisor);
}

template <typename T, typename Total>
void launch_runs(const ReductionNdArgs& args, const Tiling& along, int64_t sms, float divisor) {
  if constexpr (!HAS_PLACES<Total>) {
    const Tiling columns = columns_of_runs(along);
    auto* totals = static_cast<float*>(args.memory->workspace(columns.kept.count * sizeof(float)));
    if (columns.reduced.rank == 1 && are_elements_best<T>(columns)) {
      launch_lanes<T, Total, Access::ELEMENTS, float>(args, columns, sms, totals, 1.0f);
    } else {
      launch_shifted<T, Total, float>(args, columns, sms, totals, 1.0f);
    }
    reduction_nd_v06_dispatch_runs_kernel<T, Total>
        <<<static_cast<unsigned>(cdiv(along.kept.count, THREADS)), THREADS, 0, args.stream>>>(
            totals, args.out, along.kept.count, static_cast<int>(along.run), divisor);
    CUDA_CHECK(cudaGetLastError());
  }
}

}  // namespace

void reduction_nd_v06_dispatch(const ReductionNdArgs& args) {
  const int64_t sms = multiprocessor_count();
  dispatch_totals(args, [&](auto zero, auto total) {
    using T = decltype(zero);
    using Total = decltype(total);
    const Tiling tiling = tiling_of<T>(args, sms);
    if (tiling.tiles == 0) return;
    const float divisor = args.divisor();
    switch (route_of<T, Total>(tiling, sms)) {
      case By::SHIFTED:
        return launch_shifted<T, Total>(args, tiling, sms, args.out, divisor);
      case By::NARROW:
        return launch_narrow<T, Total>(args, tiling, sms, divisor);
      case By::RUNS:
        return launch_runs<T, Total>(args, tiling, sms, divisor);
      case By::LANES:
        return launch_lanes<T, Total, Access::ELEMENTS>(args, narrowed<T>(tiling), sms, args.out, divisor);
      case By::PACK_LANES:
        if constexpr (!HAS_PLACES<Total>) {
          launch_lanes<T, Total, Access::PACKS>(args, tiling, sms, args.out, divisor);
        }
        return;
      case By::SHORT:
        return launch_short<T, Total>(args, tiling, divisor);
      case By::COUNTED:
        return launch_counted<T>(args, short_tiling_of<T>(tiling), sms);
      case By::WARPS:
        return launch_rows_by_warp<T, Total>(args, tiling, divisor);
      case By::V05:
        return reduction_nd_v05_split(args);
    }
  });
}
