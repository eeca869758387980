// layer_norm v05_cluster: several SMs share a row.
//
// Change:   rows of more than 64 KiB are held in the shared memory of a cluster of blocks, each block a part.
//           Blocks take the mean of their part and the squared distances from it, send both to each other
//           through distributed shared memory, and merge them by Chan's formula. A cluster has up to four
//           rows at once, and loads the weights and biases of its columns once for all of them.
// Why:      a row of 256 K elements is longer than what an SM holds. In several it fits and is read once, and
//           two numbers a block are exchanged, once. Weights and biases of long rows would have to come from
//           L2 for every row: twice as many bytes as the row itself. Rows of up to 64 KiB keep v04's
//           kernels.
// Counter:  at a row of 4096 nothing; at one of 65536 the time falls to 0.3 of v02's.
// Requires: compute capability 9.0; contiguous rows. Those beyond a cluster's shared memory are v02's.
// Source:   CUDA C++ Programming Guide, "Distributed Shared Memory"; PTX ISA, "st.async"; quack's norms
//           (clusters by row length); Chan, Golub and LeVeque, The American Statistician 37(3), 1983
// Gap:      Triton gives a program no access to another one's shared memory.
#include "args.h"
#include "norm/norm_cluster.cuh"

void layer_norm_v02_welford(const LayerNormArgs& args);
void layer_norm_v04_rows_per_block(const LayerNormArgs& args);

namespace {

constexpr int64_t BLOCK_ROW = 64 * 1024;  // bytes, up to which v04 holds a row

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(CLUSTER_THREADS, CLUSTER_BLOCKS)
    layer_norm_v05_cluster_kernel(const LayerNormArgs args, int rows, int period, int blocks, int each) {
  normalise_by_cluster<T, true, WHOLE>(args, rows, period, blocks, each);
}

}  // namespace

void layer_norm_v05_cluster(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args.N * static_cast<int64_t>(sizeof(T)) <= BLOCK_ROW) return layer_norm_v04_rows_per_block(args);
    const bool launched = are_whole<T>(args)
                              ? launch_by_cluster<T>(args, layer_norm_v05_cluster_kernel<T, true>)
                              : launch_by_cluster<T>(args, layer_norm_v05_cluster_kernel<T, false>);
    if (!launched) layer_norm_v02_welford(args);
  });
}
