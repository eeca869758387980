// layer_norm v09_rows_per_warp: short rows are register-resident, one or several a warp.
//
// Change:   a warp holds rows of up to 4 KiB in registers: one if they are aligned; if they are misaligned,
//           two of the same skew at up to four packs a lane, and four at up to two. Weights and biases travel
//           meanwhile to the shared memory of the block, once for the rows of all its warps, through L1 and
//           as they lie in memory. Single lanes take the elements at the ends of misaligned rows. If rows of
//           four packs a lane are few, a kernel with fewer registers a thread lets all of their blocks run at
//           once.
// Why:      a warp of v04 loads weights and biases pack by pack, once it knows its row's statistics. For
//           misaligned rows it shifts every pack of them together from two loads, anew for each row, masks
//           the packs at the row's ends, and stores them element by element. Trials ran before the
//           predictions.
// Counter:  time falls at a row of 1027, and a little at one of 1024.
// Requires: as v08.
//           - more than 256 bytes and up to 4 KiB, either less up to a line if rows are misaligned: this
//             step's kernel
//           - other lengths, rows with a residual, and an out with another skew: v08_cluster_registers
// Source:   see v08
// Gap:      Triton leaves it to its compiler where weights lie; short rows of v06_cooperative's tiles have
//           them in registers.
#include "args.h"
#include "norm/norm_warps.cuh"

void layer_norm_v08_cluster_registers(const LayerNormArgs& args);

namespace {

template <typename T, int PACKS, bool WHOLE, int BLOCKS>
__global__ void __launch_bounds__(WARP_THREADS<WHOLE>, BLOCKS)
    layer_norm_v09_rows_per_warp_kernel(const LayerNormArgs args, int period) {
  normalise_by_warps<T, PACKS, true, WHOLE>(args, period);
}

template <typename T>
bool launch(const LayerNormArgs& args) {
  return launch_by_warps<T, false>(args, [](auto packs, auto whole, auto blocks) {
    return layer_norm_v09_rows_per_warp_kernel<T, packs, whole, blocks>;
  });
}

}  // namespace

void layer_norm_v09_rows_per_warp(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) layer_norm_v08_cluster_registers(args);
  });
}
