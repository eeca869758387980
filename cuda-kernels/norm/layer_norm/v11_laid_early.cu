// layer_norm v11_laid_early: weights and biases are realigned while the rows travel.
//
// Change:   if rows do not start on lines, a warp realigns the packs of weights and biases in shared memory
//           as soon as they have arrived, where v08 does so when it writes the result.
// Why:      weights and biases come from L1 or L2, rows from device memory: a warp of v08 idles until its
//           rows arrive, and later realigns pack after pack while none of its memory requests is under way.
//           The wait at the cluster's barrier, which precedes the exchange anyway, moves between the
//           realignment and the sums: without it the compiler mixes the two, and both wait for the rows.
//           Trials ran before the predictions.
// Counter:  time falls a little at a row of 50257, and stays at one of 5003.
// Requires: as v10.
//           - rows that do not start on lines, from 4 KiB on (6 KiB for whole packs) up to what a cluster
//             holds, without a residual, and with x's skew in out: this step's kernel
//           - others: v10_one_row
// Source:   see v08
// Gap:      Triton leaves it to its compiler where weights lie and when they are asked for.
#include "args.h"
#include "norm/norm_held.cuh"

void layer_norm_v10_one_row(const LayerNormArgs& args);

namespace {

// As in v08: the least bytes of a row, of whole packs and of others; rows of a cluster; blocks that an SM
// runs at once.
constexpr int64_t WHOLE_ROW = 6 * 1024, ROW = 4 * 1024;
constexpr int ROWS = 2, BLOCKS = 3;

template <typename T>
__global__ void __launch_bounds__(HELD_THREADS, BLOCKS)
    layer_norm_v11_laid_early_kernel(const LayerNormArgs args, int blocks, int period) {
  normalise_held<T, ROWS, HELD_PACKS, true, false, false, true>(args, blocks, period);
}

template <typename T>
bool launch(const LayerNormArgs& args) {
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  if (args.residual || are_lined<T>(args) || bytes < (are_whole<T>(args) ? WHOLE_ROW : ROW)) return false;
  return launch_held<T, ROWS, HELD_PACKS, true, false>(args, layer_norm_v11_laid_early_kernel<T>);
}

}  // namespace

void layer_norm_v11_laid_early(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) layer_norm_v10_one_row(args);
  });
}
