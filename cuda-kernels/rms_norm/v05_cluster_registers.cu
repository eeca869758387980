// rms_norm v05_cluster_registers: a long row is held in the registers of a cluster.
//
// Change:   clusters come and go again. Every warp of one asks for its part of a row, 4 KiB, by wide loads to
//           registers, and sends its sum of squares to all blocks by itself; weights travel to shared memory
//           meanwhile.
// Why:      v04's clusters stay so that loads need not wait for anything, but bulk copies to a ring keep no
//           more of the memory busy than small blocks that come and go, and each of its rows is met by
//           barriers of large blocks.
// Counter:  TBD
// Requires: as v04, whose rows of up to 64 KiB and longer ones than a cluster holds, 512 KiB less up to a
// line,
//           are, those with a residual, and those whose result is skewed otherwise than x.
// Source:   quack's softmax, whose clusters have parts as small and exchange warp by warp
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "../norm_held.cuh"
#include "args.h"

void rms_norm_v04_rows_ahead(const RmsNormArgs& args);

namespace {

constexpr int64_t SHORT_ROW = 64 * 1024;  // bytes up to which a block each is faster
constexpr int BLOCKS = 4;                 // at once on an SM, which leaves a thread 64 registers

template <typename T, bool LINED>
__global__ void __launch_bounds__(HELD_THREADS, BLOCKS)
    rms_norm_v05_cluster_registers_kernel(const RmsNormArgs args, int blocks, int period) {
  normalise_held<T, 1, false, LINED>(args, blocks, period);
}

template <typename T>
bool launch(const RmsNormArgs& args) {
  if (args.N * static_cast<int64_t>(sizeof(T)) <= SHORT_ROW) return false;
  return are_lined<T>(args)
             ? launch_held<T, 1, false, true>(args, rms_norm_v05_cluster_registers_kernel<T, true>)
             : launch_held<T, 1, false, false>(args, rms_norm_v05_cluster_registers_kernel<T, false>);
}

}  // namespace

void rms_norm_v05_cluster_registers(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) rms_norm_v04_rows_ahead(args);
  });
}
