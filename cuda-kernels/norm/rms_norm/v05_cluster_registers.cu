// rms_norm v05_cluster_registers: a cluster holds a register-resident row.
//
// Change:   clusters are not persistent any more. A warp loads its part of a row, 1.5 KiB to 4, straight to
//           registers, and sends its sum of squares to all blocks by itself; weights travel to shared memory
//           meanwhile, through L1. A row of 22.5 to 24 KiB that starts on a line goes to one block of sixteen
//           warps.
// Why:      v04's clusters stay so that loads need not wait for anything, but small blocks that come and go
//           keep as much of the memory busy as a ring does, and a ring's large blocks meet at barriers for
//           every row. Weights that other blocks of an SM have loaded are in its L1; from L2 they would be as
//           many bytes as the rows. Two predictions came with parts of 1.5 KiB and with residuals, the last
//           one with one block for rows of 24 KiB. Trials ran before all.
// Counter:  time falls at rows of 4096, 12288, 50257 and 65536, and with a residual.
// Requires: as v04.
//           - from 8 KiB on, or 4 KiB with a residual: this step's kernel
//           - shorter: v04_rows_ahead
//           - longer than a cluster holds, which is 512 KiB, or 320 KiB with a residual, less up to a line if
//             rows do not start on lines: v04_rows_ahead
//           - another matrix with a skew that differs from x's: v04_rows_ahead
// Source:   quack's softmax, whose clusters have parts as small and exchange warp by warp
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "norm/norm_held.cuh"

void rms_norm_v04_rows_ahead(const RmsNormArgs& args);

namespace {

// The least bytes of a row for this step, without a residual and with one.
constexpr int64_t ROW = 8 * 1024, ROW_AND_RESIDUAL = 4 * 1024;

// Threads that an SM runs at once: one has 64 registers, or 80 where a residual takes some.
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
  // More packs a thread would leave no registers for the residual.
  if (args.residual) return launch<T, HELD_PACKS, LINED, true>(args);
  return launch<T, HELD_PACKS, LINED, false>(args) || launch<T, MOST_HELD_PACKS, LINED, false>(args);
}
// Rows that start on lines, with few packs a thread. The longest fill one block of sixteen warps, of which an
// SM runs two: they need no cluster, which takes longer to start.
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
