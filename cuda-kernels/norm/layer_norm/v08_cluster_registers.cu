// layer_norm v08_cluster_registers: two rows are held in the registers of a cluster.
//
// Change:   clusters come and go again. Every warp of one asks for its parts of two rows, 1.5 KiB to 4 each,
//           by wide loads to registers, and sends their means and squares to all blocks by itself. Weights
//           and biases travel to shared memory for both, as they lie in memory, by way of L1.
// Why:      a ring keeps no more of the memory busy than small blocks that come and go, and its large blocks
//           meet at barriers for every row. Where rows start anywhere, v07 puts together other weights and
//           biases for each. All SMs would have them from L2, and of its slices few have those of a short
//           row; of an SM's L1 every block after the first has them. The first three predictions are for
//           a form that takes rows which start anywhere alone, the next two for one that knows no small
//           parts and leaves residuals to v07, the next two for one without parts of 4 KiB, which leaves
//           the longest rows to v07, the last for this one. Trials ran before all.
// Counter:  long_scoreboard falls from 6.6 to 3.7; the time to 0.98 of v07's at a row of 4096, to 0.96 at one
//           of 5003, to 0.89 at one of 50257, to 0.97 at rows of 65536 and 262144.
// Requires: as v07, whose other rows are: those of less than 4 KiB, or 6 KiB of whole packs without a
//           residual; longer ones than a cluster holds: 512 KiB where rows start with lines and there is no
//           residual, otherwise 320, less up to a line where they start anywhere; those of which another
//           matrix is skewed otherwise than x. With a residual a cluster has one row.
// Source:   quack's softmax, whose clusters have parts as small and exchange warp by warp
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "norm/norm_held.cuh"

void layer_norm_v07_rows_ahead(const LayerNormArgs& args);

namespace {

// Bytes from which rows are held: of whole packs without a residual, and others.
constexpr int64_t WHOLE_ROW = 6 * 1024, ROW = 4 * 1024;
// Bytes of a row above which threads hold as many packs as they have registers for: blocks of four warps
// would not hold two in smaller parts. Where rows start anywhere those are faster all the same.
constexpr int64_t LONG_ROW = 4 * 32 * MOST_CLUSTER_BLOCKS * HELD_PACKS * 16;
// Blocks of HELD_THREADS at once on an SM, which leaves a thread 80 registers, or 128 for many packs.
template <int PACKS>
constexpr int BLOCKS = PACKS == MOST_HELD_PACKS ? 2 : 3;
// Of a cluster, side by side; a residual takes the registers of the second.
constexpr int rows(bool residual) { return residual ? 1 : 2; }

template <typename T, int PACKS, bool LINED, bool RESIDUAL>
__global__ void __launch_bounds__(HELD_THREADS, BLOCKS<PACKS>)
    layer_norm_v08_cluster_registers_kernel(const LayerNormArgs args, int blocks, int period) {
  normalise_held<T, rows(RESIDUAL), PACKS, true, LINED, RESIDUAL>(args, blocks, period);
}

template <typename T, int PACKS, bool LINED, bool RESIDUAL>
bool launch(const LayerNormArgs& args) {
  return launch_held<T, rows(RESIDUAL), PACKS, true, LINED>(
      args, layer_norm_v08_cluster_registers_kernel<T, PACKS, LINED, RESIDUAL>);
}
template <typename T>
bool launch(const LayerNormArgs& args) {
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  if (bytes < (are_whole<T>(args) && !args.residual ? WHOLE_ROW : ROW)) return false;
  if (!are_lined<T>(args))
    return args.residual ? launch<T, HELD_PACKS, false, true>(args)
                         : launch<T, HELD_PACKS, false, false>(args);
  if (args.residual) return launch<T, HELD_PACKS, true, true>(args);
  if (bytes <= FEW_HELD_BYTES) return launch<T, FEW_HELD_PACKS, true, false>(args);
  return bytes <= LONG_ROW ? launch<T, HELD_PACKS, true, false>(args)
                           : launch<T, MOST_HELD_PACKS, true, false>(args);
}

}  // namespace

void layer_norm_v08_cluster_registers(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) layer_norm_v07_rows_ahead(args);
  });
}
