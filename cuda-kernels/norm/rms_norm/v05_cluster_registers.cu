// rms_norm v05_cluster_registers: a long row is held in the registers of a cluster.
//
// Change:   clusters come and go again. Every warp of one asks for its part of a row, 1.5 KiB to 4, by wide
//           loads to registers, and sends its sum of squares to all blocks by itself; weights travel to
//           shared memory meanwhile, by way of L1. Rows of 22.5 to 24 KiB that start with lines are one
//           block's, of sixteen warps.
// Why:      v04's clusters stay so that loads need not wait for anything, but bulk copies to a ring keep no
//           more of the memory busy than small blocks that come and go, and each of its rows is met by
//           barriers of large blocks. What other blocks of an SM had of the weights is in L1; from L2 they
//           would be as much to bring as the rows. Two predictions came when parts of 1.5 KiB and rows
//           with a residual did, the last when rows of 24 KiB became one block's. Trials ran before all.
// Counter:  the time falls to 0.99 of v04's at rows of 4096 and 12288, to 0.93 at one of 50257, to 0.96 at
//           one of 65536, to 0.98 with a residual.
// Requires: as v04, whose rows of less than 8 KiB are, or 4 with a residual, longer ones than a cluster
//           holds, 512 KiB less up to a line, or 320 with a residual, and those of which another matrix is
//           skewed otherwise than x.
// Source:   quack's softmax, whose clusters have parts as small and exchange warp by warp
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "norm/norm_held.cuh"

void rms_norm_v04_rows_ahead(const RmsNormArgs& args);

namespace {

// Bytes from which rows are held, without a residual and with one.
constexpr int64_t ROW = 8 * 1024, ROW_AND_RESIDUAL = 4 * 1024;

// At once on an SM, which leaves one 64 registers, or 80 where a residual takes some.
constexpr int threads_at_once(bool residual) { return residual ? 768 : 1024; }

template <typename T, int PACKS, bool LINED, bool RESIDUAL, int THREADS>
__global__ void __launch_bounds__(THREADS, threads_at_once(RESIDUAL) / THREADS)
    rms_norm_v05_cluster_registers_kernel(const RmsNormArgs args, int blocks, int period) {
  normalise_held<T, 1, PACKS, false, LINED, RESIDUAL>(args, blocks, period);
}

template <typename T, int PACKS, bool LINED, bool RESIDUAL, int THREADS = HELD_THREADS>
bool launch(const RmsNormArgs& args) {
  return launch_held<T, 1, PACKS, false, LINED, THREADS / 32>(
      args, rms_norm_v05_cluster_registers_kernel<T, PACKS, LINED, RESIDUAL, THREADS>);
}
template <typename T, bool LINED>
bool launch(const RmsNormArgs& args) {
  if (args.residual) return launch<T, HELD_PACKS, LINED, true>(args);  // longer rows have no registers for it
  return launch<T, HELD_PACKS, LINED, false>(args) || launch<T, MOST_HELD_PACKS, LINED, false>(args);
}
// Rows that start with lines, of which threads have few packs. The longest fill one block of sixteen warps,
// of which an SM runs two: they need no cluster, which would take longer to start.
template <typename T>
bool launch_few(const RmsNormArgs& args, int64_t bytes) {
  constexpr int64_t PART = 32 * FEW_HELD_PACKS * 16;
  return bytes > FEW_HELD_BYTES - PART ? launch<T, FEW_HELD_PACKS, true, false, 2 * HELD_THREADS>(args)
                                       : launch<T, FEW_HELD_PACKS, true, false>(args);
}
template <typename T>
bool launch(const RmsNormArgs& args) {
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  if (bytes < (args.residual ? ROW_AND_RESIDUAL : ROW)) return false;
  if (!are_lined<T>(args)) return launch<T, false>(args);
  return !args.residual && bytes <= FEW_HELD_BYTES ? launch_few<T>(args, bytes) : launch<T, true>(args);
}

}  // namespace

void rms_norm_v05_cluster_registers(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) rms_norm_v04_rows_ahead(args);
  });
}
