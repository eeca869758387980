// reduction_nd v06_dispatch: columns that are no whole packs are read with more loads in flight.
//
// Change:   down columns that cannot be read by packs, a thread has sixteen loads of one element in flight
//           instead of four, for argmax eight. Everything else goes to v05's kernels.
// Why:      by Little's law the bytes in flight set the rate. Four loads of one fp16 element are 8 bytes a
//           thread, where a thread of aligned columns has 64.
// Error:    as v05's.
// Counter:  at the bench cases, whose columns are whole packs, nothing changes; the time falls down columns
//           of a matrix whose rows lie an odd number of elements apart.
// Requires: nothing. The counters are 0 at the start and again at the end.
// Routes:   see ROUTES
#include <type_traits>

#include "split_columns.cuh"

void reduction_nd_v05_split(const ReductionNdArgs& args);

namespace {

// In flight a thread, each of one element. Argmax has fewer: each needs the index of its row in registers.
constexpr int MANY_NARROW = 16;
template <typename Total>
constexpr int NARROW_LOADS = std::is_same_v<Total, ArgMax> ? MANY_NARROW / 2 : MANY_NARROW;
template <typename Total>
constexpr int NARROW_RESIDENT = std::is_same_v<Total, ArgMax> ? RESIDENT - 1 : RESIDENT;  // blocks an SM

enum class By {
  V05,     // v05's kernels
  NARROW,  // single elements of columns, NARROW_LOADS<Total> at once
};

struct Route {
  bool columns, wide;  // down columns or along rows, by packs or by elements
  int64_t loads;       // at least, of a thread
  By by;
};

// The first line that fits counts.
constexpr Route ROUTES[] = {
    {true, false, MANY_NARROW, By::NARROW},
    {true, false, 0, By::V05},  // the other loads would bring nothing
    {true, true, 0, By::V05},
    {false, false, 0, By::V05},
    {false, true, 0, By::V05},
};

By route_of(const Tiling& tiling) {
  for (const Route& route : ROUTES) {
    const bool fits = route.columns == (tiling.columns > 0) && route.wide == tiling.wide;
    if (fits && tiling.units() >= route.loads * tiling.sharing()) return route.by;
  }
  return By::V05;
}

template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS, NARROW_RESIDENT<Total>)
    reduction_nd_v06_dispatch_columns_kernel(const T* x, void* out, const __grid_constant__ Tiling tiling,
                                             float divisor, Total* workspace, unsigned* counters) {
  reduce_columns<T, false, NARROW_LOADS<Total>>(x, out, tiling, divisor, workspace, counters);
}

// Parts a tile: as many as fill the GPU, as long as each has a round of loads; a split tile needs a counter.
template <typename Total>
int64_t parts_of(const Tiling& tiling, int64_t sms) {
  if (tiling.tiles >= std::min(sms * NARROW_RESIDENT<Total>, int64_t{COUNTERS})) return 1;
  const int64_t round = int64_t{tiling.sharing()} * NARROW_LOADS<Total>;
  return std::max(std::min(sms * NARROW_RESIDENT<Total> / tiling.tiles, cdiv(tiling.units(), round)),
                  int64_t{1});
}

template <typename T, typename Total>
void launch_narrow(const ReductionNdArgs& args, const Tiling& tiling, int64_t sms) {
  const int64_t parts = parts_of<Total>(tiling, sms), totals = tiling.tiles * parts * tiling.columns;
  auto* workspace = parts > 1 ? static_cast<Total*>(args.memory->workspace(totals * sizeof(Total))) : nullptr;
  auto* counters = parts > 1 ? static_cast<unsigned*>(args.memory->zeroed()) : nullptr;
  const dim3 grid(tiling.tiles, parts);
  reduction_nd_v06_dispatch_columns_kernel<T, Total>
      <<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), args.out, tiling,
                                          divisor_of(args, args.reduced_axes()), workspace, counters);
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void reduction_nd_v06_dispatch(const ReductionNdArgs& args) {
  const int64_t sms = multiprocessor_count();
  dispatch_totals(args, [&](auto zero, auto total) {
    using T = decltype(zero);
    using Total = decltype(total);
    const Tiling tiling = tiling_of<T>(args, sms);
    if (tiling.tiles == 0) return;
    if (route_of(tiling) == By::V05) return reduction_nd_v05_split(args);
    launch_narrow<T, Total>(args, tiling, sms);
  });
}
