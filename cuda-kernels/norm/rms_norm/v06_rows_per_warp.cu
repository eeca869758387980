// rms_norm v06_rows_per_warp: layer_norm's v09, without a mean.
//
// Change:   a warp holds rows of up to 4 KiB in registers: one if they are aligned; if they are misaligned,
//           two of the same skew at up to four packs a lane, and four at up to two. Weights travel meanwhile
//           to the shared memory of the block, once for the rows of all its warps, through L1 and as they lie
//           in memory. Single lanes take the elements at the ends of misaligned rows. Rows of whole packs run
//           with a small L1, as in softmax's v13.
// Why:      a warp of v02 loads weights pack by pack, once it knows its row's sum. For misaligned rows it
//           shifts every pack of them together from two loads, anew for each row, masks the packs at the
//           row's ends, and stores them element by element. The last prediction is for rows of whole packs
//           with a small L1. Trials ran before all.
// Counter:  time falls a little at rows of 256, 1024 and 1027, and more where rows of 1024 are few.
// Requires: as v05.
//           - more than 256 bytes and up to 4 KiB, either less up to a line if rows are misaligned: this
//             step's kernel
//           - other lengths, rows with a residual, and an out with another skew: v05_cluster_registers
// Source:   see v05
// Gap:      Triton leaves it to its compiler where weights lie; short rows of v03_cooperative's tiles have
//           them in registers.
#include "args.h"
#include "norm/norm_warps.cuh"

void rms_norm_v05_cluster_registers(const RmsNormArgs& args);

namespace {

template <typename T, int PACKS, bool WHOLE>
__global__ void __launch_bounds__(WARP_THREADS<WHOLE>, WARP_BLOCKS<PACKS, WHOLE>)
    rms_norm_v06_rows_per_warp_kernel(const RmsNormArgs args, int period) {
  normalise_by_warps<T, PACKS, false, WHOLE>(args, period);
}

template <typename T>
bool launch(const RmsNormArgs& args) {
  return launch_by_warps<T, true>(args, [](auto packs, auto whole, auto) {  // four blocks fit without a bound
    return rms_norm_v06_rows_per_warp_kernel<T, packs, whole>;
  });
}

}  // namespace

void rms_norm_v06_rows_per_warp(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) rms_norm_v05_cluster_registers(args);
  });
}
