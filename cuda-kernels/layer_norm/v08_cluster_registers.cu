// layer_norm v08_cluster_registers: two rows are held in the registers of a cluster.
//
// Change:   clusters come and go again. Every warp of one asks for its parts of two rows, 2.5 KiB each, by
//           wide loads to registers, and sends their means and squares to all blocks by itself. Weights and
//           biases travel to shared memory for both, as they lie in memory, by way of L1.
// Why:      a ring keeps no more of the memory busy than small blocks that come and go, and its large blocks
//           meet at barriers for every row. Where rows start anywhere, v07 puts together other weights and
//           biases for each. All SMs would have them from L2, and of its slices few have those of a short
//           row; of an SM's L1 every block after the first has them.
// Counter:  TBD
// Requires: as v07, whose other rows are: those of up to 4 KiB, or 6 KiB of whole packs; longer ones than a
//           cluster holds two of, 320 KiB less up to a line; those of which another matrix is skewed
//           otherwise than x. With a residual a cluster has one row.
// Source:   quack's softmax, whose clusters have parts as small and exchange warp by warp
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "../norm_held.cuh"
#include "args.h"

void layer_norm_v07_rows_ahead(const LayerNormArgs& args);

namespace {

// Bytes up to which v07's kernels are faster, where rows have only whole packs and otherwise.
constexpr int64_t SHORT_WHOLE_ROW = 6 * 1024, SHORT_ROW = 4 * 1024;
constexpr int BLOCKS = 3;  // of HELD_THREADS at once on an SM, which leaves a thread 80 registers
// Of a cluster, side by side; a residual takes the registers of the second.
constexpr int rows(bool residual) { return residual ? 1 : 2; }

template <typename T, bool LINED, bool RESIDUAL>
__global__ void __launch_bounds__(HELD_THREADS, BLOCKS)
    layer_norm_v08_cluster_registers_kernel(const LayerNormArgs args, int blocks, int period) {
  normalise_held<T, rows(RESIDUAL), HELD_PACKS, true, LINED, RESIDUAL>(args, blocks, period);
}

template <typename T, bool RESIDUAL>
bool launch(const LayerNormArgs& args) {
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  if (bytes <= (are_whole<T>(args) ? SHORT_WHOLE_ROW : SHORT_ROW)) return false;
  return are_lined<T>(args) ? launch_held<T, rows(RESIDUAL), HELD_PACKS, true, true>(
                                  args, layer_norm_v08_cluster_registers_kernel<T, true, RESIDUAL>)
                            : launch_held<T, rows(RESIDUAL), HELD_PACKS, true, false>(
                                  args, layer_norm_v08_cluster_registers_kernel<T, false, RESIDUAL>);
}

}  // namespace

void layer_norm_v08_cluster_registers(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!(args.residual ? launch<T, true>(args) : launch<T, false>(args))) layer_norm_v07_rows_ahead(args);
  });
}
