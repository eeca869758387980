// layer_norm v08_cluster_registers: a cluster holds two register-resident rows.
//
// Change:   clusters are not persistent any more. A warp loads its parts of two rows, 1.5 KiB to 4 each,
//           straight to registers, and sends their means and squares to all blocks by itself. Weights and
//           biases travel to shared memory once for both rows, through L1, as they lie in memory.
// Why:      small blocks that come and go keep as much of the memory busy as a ring does, and a ring's large
//           blocks meet at barriers for every row. For misaligned rows, v07 shifts weights and biases
//           together anew for every skew. From L2 all SMs would read those of a short row, which lie in few
//           of its slices; in an SM's L1 every block after the first finds them. Predictions one to three are
//           for a form that takes misaligned rows alone, the next two for one without parts of 1.5 KiB that
//           leaves residuals to v07, the next two for one without parts of 4 KiB that leaves the longest rows
//           to v07, the last for this one. Trials ran before all.
// Counter:  long_scoreboard falls; time falls at rows of 4096, 5003, 65536 and 262144, most at one of 50257.
// Requires: as v07.
//           - from 4 KiB on, or 6 KiB for whole packs without a residual: this step's kernel, one row a
//             cluster with a residual, else two
//           - shorter: v07_rows_ahead
//           - longer than a cluster holds: v07_rows_ahead. It holds 512 KiB if rows start on lines without a
//             residual, else 320 KiB, less up to a line if rows do not start on lines.
//           - another matrix with a skew that differs from x's: v07_rows_ahead
// Source:   quack's softmax, whose clusters have parts as small and exchange warp by warp
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "norm/norm_held.cuh"

void layer_norm_v07_rows_ahead(const LayerNormArgs& args);

namespace {

// The least bytes of a row for this step: of whole packs without a residual, and of others.
constexpr int64_t WHOLE_ROW = 6 * 1024, ROW = 4 * 1024;
// Bytes of a row above which a thread holds MOST_HELD_PACKS, as many packs as it has registers for: blocks of
// four warps would not hold two such rows in smaller parts. Rows that do not start on lines are faster in
// smaller parts all the same.
constexpr int64_t LONG_ROW = 4 * 32 * MOST_CLUSTER_BLOCKS * HELD_PACKS * 16;
// Blocks of HELD_THREADS that an SM runs at once: a thread has 80 registers, or 128 for many packs.
template <int PACKS>
constexpr int BLOCKS = PACKS == MOST_HELD_PACKS ? 2 : 3;
// Rows that a cluster takes at once; a residual takes the registers of the second.
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
