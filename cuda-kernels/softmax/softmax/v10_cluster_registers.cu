// softmax v10_cluster_registers: a split row, held in the registers of a cluster.
//
// Change:   each warp of a cluster loads its part of a row, 2.5 or 4 KiB, straight to registers, and sends
//           its own maximum and sum to all blocks of the cluster. Packs are counted from the line in which
//           the row begins; elements beside whole packs go to single lanes, one each.
// Why:      v07 keeps a block's part in shared memory: one thread issues the copies, the part is read from
//           there twice, and the block meets at barriers before and after its numbers are known. Smaller
//           blocks, of four warps with 10 KiB instead of 16 with 64 KiB, also start and end in finer steps.
//           Trials of the kernel ran before the predictions.
// Counter:  at a row of 4096, which goes to v05's kernel, nothing changes; at longer rows shared_memory,
//           instructions and time fall.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   up to 16 KiB: v05's kernel, as one block a row is as fast
//           up to 320 KiB, less up to a line of skew: a cluster, five packs a lane
//           up to 512 KiB, less up to a line of skew: a cluster, eight packs a lane
//           longer, without room for the cluster, or if out's skew within 16 bytes differs from x's: v07's
//           kernel
// Source:   quack's softmax, whose clusters have parts as small, and exchange warp by warp
// Twin:     none, see the spec
#include "cluster_row.cuh"

void softmax_v05_rows_per_block(const SoftmaxArgs& args);
void softmax_v07_cluster(const SoftmaxArgs& args);

namespace {

constexpr int64_t SHORT_ROW = 16 * 1024;  // bytes up to which one block a row is as fast

// x: [M, N], rows stride_xm apart; out: [M, N]. A cluster of `blocks` blocks holds one row.
template <typename T, Form FORM, int PACKS>
__global__ void __launch_bounds__(HELD_THREADS, CLUSTER_BLOCKS)
    softmax_v10_cluster_registers_kernel(const T* __restrict__ x, T* __restrict__ out, int N,
                                         int64_t stride_xm, int blocks) {
  softmax_of_cluster_row<T, FORM, PACKS, Skews::ALIKE>(x, out, N, stride_xm, blocks);
}

template <typename T, Form FORM>
bool launch(const SoftmaxArgs& args) {
  const auto launch_packs = [&](auto packs) {
    return launch_cluster_rows<T, Skews::ALIKE>(args, packs,
                                                softmax_v10_cluster_registers_kernel<T, FORM, packs>);
  };
  return launch_packs(std::integral_constant<int, HELD_PACKS>{}) ||
         launch_packs(std::integral_constant<int, MOST_HELD_PACKS>{});
}

}  // namespace

void softmax_v10_cluster_registers(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args.N * static_cast<int64_t>(sizeof(T)) <= SHORT_ROW) return softmax_v05_rows_per_block(args);
    const bool alike = skewed_alike<T>(args.x, args.stride_xm, args.out, args.N);
    const bool launched =
        alike && (args.log ? launch<T, Form::LOGARITHM>(args) : launch<T, Form::SOFTMAX>(args));
    if (!launched) softmax_v07_cluster(args);
  });
}
