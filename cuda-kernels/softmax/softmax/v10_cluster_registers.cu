// softmax v10_cluster_registers: a split row, held in the registers of a cluster.
//
// Change:   each warp of a cluster loads its part of a row, 2.5 or 4 KiB, straight to registers, and sends
//           its own maximum and sum to all blocks of the cluster.
// Why:      v09 keeps a block's part in shared memory: one thread issues the copies, the part is read from
//           there twice, and the block meets at barriers before and after its numbers are known. Smaller
//           blocks, of four warps with 10 KiB instead of 16 with 64 KiB, also start and end in finer steps.
//           Trials of the kernel ran before the predictions.
// Counter:  at a row of 4096, which goes to v09's kernel, nothing changes; at longer rows shared_memory,
//           instructions and time fall.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   up to 16 KiB: v09's kernel, as one block a row is as fast
//           up to 320 KiB, less up to a line of skew: a cluster, five packs a lane
//           up to 512 KiB, less up to a line of skew: a cluster, eight packs a lane
//           longer, without room for the cluster, or if out's skew within 16 bytes differs from x's: v09's
//           kernel
// Source:   quack's softmax, whose clusters have parts as small, and exchange warp by warp
// Twin:     none, see the spec
#include "cluster_row.cuh"

void softmax_v09_lines(const SoftmaxArgs& args);

namespace {

constexpr int64_t SHORT_ROW = 16 * 1024;  // bytes up to which one block a row is as fast
constexpr int BLOCKS = 4;                 // of HELD_THREADS on an SM, which bounds a thread to 64 registers

// x: [M, N], rows stride_xm apart; out: [M, N]. A cluster of `blocks` blocks holds one row.
template <typename T, bool LOG, int PACKS>
__global__ void __launch_bounds__(HELD_THREADS, BLOCKS)
    softmax_v10_cluster_registers_kernel(const T* __restrict__ x, T* __restrict__ out, int N,
                                         int64_t stride_xm, int blocks) {
  softmax_of_cluster_row<T, LOG, PACKS>(x, out, N, stride_xm, blocks);
}

// Returns false, without a launch, if the skews of x and out differ, the row is too long, or the GPU has no
// room for the cluster.
template <typename T, bool LOG, int PACKS>
bool launch(const SoftmaxArgs& args) {
  if (!skewed_alike<T>(args.x, args.stride_xm, args.out, args.N)) return false;
  const HeldShape shape(most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm), PACKS);
  return launch_by_rows(args.M, shape, 0, args.stream, softmax_v10_cluster_registers_kernel<T, LOG, PACKS>,
                        static_cast<const T*>(args.x), static_cast<T*>(args.out), static_cast<int>(args.N),
                        args.stride_xm, shape.blocks);
}
template <typename T, bool LOG>
bool launch(const SoftmaxArgs& args) {
  if (args.N * static_cast<int64_t>(sizeof(T)) <= SHORT_ROW) return false;
  return launch<T, LOG, HELD_PACKS>(args) || launch<T, LOG, MOST_HELD_PACKS>(args);
}

}  // namespace

void softmax_v10_cluster_registers(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!(args.log ? launch<T, true>(args) : launch<T, false>(args))) softmax_v09_lines(args);
  });
}
