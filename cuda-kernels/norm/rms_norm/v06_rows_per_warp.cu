// rms_norm v06_rows_per_warp: layer_norm's v09, without a mean.
//
// Change:   a row of up to 4 KiB lies in the registers of a warp. Where rows start anywhere, it has two that
//           are skewed alike if they are of up to four packs a lane, and four if of up to two. Weights
//           travel to the shared memory of its block meanwhile, for the rows of all warps, as they lie in
//           memory, by way of L1. Elements at the ends of skewed rows are single lanes'. Whole rows leave L1
//           as small as softmax's v12 does.
// Why:      a warp of v02 asks for weights pack by pack once it knows its row's sum. Where rows start
//           anywhere, it puts every pack of them together from two loads, for each row anew, masks what lies
//           beside the row, and stores the packs at its ends element by element. The last prediction is
//           for whole rows that leave L1 small. Trials ran before all.
// Counter:  the time falls to 0.99 of v05's at rows of 256, 1024 and 1027, to 0.97 where rows of 1024 are
//           few.
// Requires: as v05, whose other rows are: those of more than 4 KiB or up to 256 bytes, of either up to a line
//           less where they start anywhere; those with a residual; those of which out is skewed otherwise.
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
  return launch_by_warps<T, true>(args,
                                  [](auto packs, auto whole, auto) {  // registers leave room for four anyway
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
