// rms_norm v05_cluster_registers: a long row is held in the registers of a cluster.
//
// Change:   clusters come and go again. Every warp of one asks for its part of a row, 2.5 KiB or 4, by wide
//           loads to registers, and sends its sum of squares to all blocks by itself; weights travel to
//           shared memory meanwhile, by way of L1.
// Why:      v04's clusters stay so that loads need not wait for anything, but bulk copies to a ring keep no
//           more of the memory busy than small blocks that come and go, and each of its rows is met by
//           barriers of large blocks. What other blocks of an SM had of the weights is in L1; asked for
//           there by every row, they would be half as much to bring from L2 as the rows.
// Counter:  TBD
// Requires: as v04, whose rows of up to 8 KiB are, longer ones than a cluster holds, 512 KiB less up to a
//           line, or 320 with a residual, and those of which another matrix is skewed otherwise than x.
// Source:   quack's softmax, whose clusters have parts as small and exchange warp by warp
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "../norm_held.cuh"
#include "args.h"

void rms_norm_v04_rows_ahead(const RmsNormArgs& args);

namespace {

constexpr int64_t SHORT_ROW = 8 * 1024;  // bytes up to which v04's kernels are as fast

// Of HELD_THREADS at once on an SM, which leaves a thread 64 registers, or 80 where a residual takes some.
constexpr int blocks_at_once(bool residual) { return residual ? 3 : 4; }

template <typename T, int PACKS, bool LINED, bool RESIDUAL>
__global__ void __launch_bounds__(HELD_THREADS, blocks_at_once(RESIDUAL))
    rms_norm_v05_cluster_registers_kernel(const RmsNormArgs args, int blocks, int period) {
  normalise_held<T, 1, PACKS, false, LINED, RESIDUAL>(args, blocks, period);
}

template <typename T, int PACKS, bool RESIDUAL>
bool launch(const RmsNormArgs& args) {
  return are_lined<T>(args) ? launch_held<T, 1, PACKS, false, true>(
                                  args, rms_norm_v05_cluster_registers_kernel<T, PACKS, true, RESIDUAL>)
                            : launch_held<T, 1, PACKS, false, false>(
                                  args, rms_norm_v05_cluster_registers_kernel<T, PACKS, false, RESIDUAL>);
}

// Longer rows have no registers for a residual.
template <typename T>
bool launch(const RmsNormArgs& args) {
  if (args.N * static_cast<int64_t>(sizeof(T)) <= SHORT_ROW) return false;
  if (args.residual) return launch<T, HELD_PACKS, true>(args);
  return launch<T, HELD_PACKS, false>(args) || launch<T, MOST_HELD_PACKS, false>(args);
}

}  // namespace

void rms_norm_v05_cluster_registers(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) rms_norm_v04_rows_ahead(args);
  });
}
