// layer_norm v09_rows_per_warp: short rows are held as v08's long ones are, by a warp.
//
// Change:   a row of up to 4 KiB lies in the registers of a warp. Where rows start anywhere, it has two that
//           are skewed alike if they are of up to four packs a lane, and four if of up to two. Weights and
//           biases travel to the shared memory of its block meanwhile, for the rows of all warps, as they lie
//           in memory, by way of L1. Elements at the ends of skewed rows are single lanes'. Few rows of four
//           packs a lane have fewer registers, where with these all their blocks run at once.
// Why:      a warp of v04 asks for weights and biases pack by pack once it knows its row's numbers. Where
//           rows start anywhere, it puts every pack of them together from two loads, for each row anew,
//           masks what lies beside the row, and stores the packs at its ends element by element. Trials
//           ran before the predictions.
// Counter:  the time falls to 0.77 of v08's at a row of 1027, to 0.983 at one of 1024, to 0.995 where rows of
//           1024 are few.
// Requires: as v08, whose other rows are: those of more than 4 KiB or up to 256 bytes, of either up to a line
//           less where they start anywhere; those with a residual; those of which out is skewed otherwise.
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
