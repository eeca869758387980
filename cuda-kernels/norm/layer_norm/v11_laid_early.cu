// layer_norm v11_laid_early: weights and biases are put together while the rows are on their way.
//
// Change:   where rows start anywhere, a warp does not put the packs of weights and biases together when it
//           writes the result, but as soon as they have come to shared memory, and puts them back there.
// Why:      they come by way of L1 or from L2, rows from device memory: a warp of v08 waits for its rows with
//           nothing to do, and then puts together pack after pack while none of its memory requests is under
//           way. The cluster's barrier, which comes before the exchange anyway, is waited for in between:
//           left alone, the compiler mixes the laying with the first sums, and both wait for the rows.
//           Trials ran before the predictions.
// Counter:  the time falls to 0.996 of v10's at a row of 50257, and stays at one of 5003.
// Requires: as v10, whose other rows are: those that start with lines, those of less than 4 KiB, or 6 KiB of
//           whole packs, longer ones than a cluster holds, and those with a residual or another skew of out.
// Source:   see v08
// Gap:      Triton leaves it to its compiler where weights lie and when they are asked for.
#include "args.h"
#include "norm/norm_held.cuh"

void layer_norm_v10_one_row(const LayerNormArgs& args);

namespace {

// As v08's: bytes from which rows are held, of whole packs and others; rows side by side; and blocks at once
// on an SM.
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
