// layer_norm v08_cluster_registers: long rows that start anywhere are held in the registers of a cluster.
//
// Change:   for such rows clusters come and go again. Every warp of one asks for its parts of two rows, 2 KiB
//           each, by wide loads to registers, and sends their means and squares to all blocks by itself.
//           Weights and biases travel to shared memory, as they lie in memory, for both.
// Why:      v07 keeps weights and biases in registers, as packs that lie like the row's; where rows start
//           anywhere, every row needs others, and they are put together anew from L2.
// Counter:  TBD
// Requires: as v07, whose other rows are: those of whole packs, as their weights and biases; of up to 32 KiB,
// or
//           longer than a cluster holds two of, 256 KiB less up to a line; those with a residual, or whose
//           result is skewed otherwise than x.
// Source:   quack's softmax, whose clusters have parts as small and exchange warp by warp
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "../norm_held.cuh"
#include "args.h"

void layer_norm_v07_rows_ahead(const LayerNormArgs& args);

namespace {

constexpr int64_t SHORT_ROW = 32 * 1024;  // bytes up to which a block each is faster
constexpr int BLOCKS = 3;                 // at once on an SM, which leaves a thread 80 registers
constexpr int ROWS = 2;                   // of a cluster, side by side

template <typename T>
__global__ void __launch_bounds__(HELD_THREADS, BLOCKS)
    layer_norm_v08_cluster_registers_kernel(const LayerNormArgs args, int blocks, int period) {
  normalise_held<T, ROWS, true, false>(args, blocks, period);
}

template <typename T>
bool launch(const LayerNormArgs& args) {
  if (args.N * static_cast<int64_t>(sizeof(T)) <= SHORT_ROW || are_whole<T>(args)) return false;
  return launch_held<T, ROWS, true, false>(args, layer_norm_v08_cluster_registers_kernel<T>);
}

}  // namespace

void layer_norm_v08_cluster_registers(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) layer_norm_v07_rows_ahead(args);
  });
}
