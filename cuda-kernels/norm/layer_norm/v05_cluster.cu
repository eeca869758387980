// layer_norm v05_cluster: the blocks of a cluster share a split row.
//
// Change:   a row of more than 64 KiB is split: it lies in the shared memory of a cluster, one part in each
//           block. A block computes the mean and the squared distances of its part; the blocks send each
//           other both through DSMEM, and merge them by Chan's formula. A cluster takes up to four rows at
//           once, and loads the weights and biases of its columns once for all of them.
// Why:      a row of 256 K elements does not fit one SM. Split over several, it is read once, and each block
//           sends two numbers, once. Weights and biases of long rows would otherwise come from L2 for every
//           row: twice as many bytes as the row itself. Rows of up to 64 KiB keep v04's kernels.
// Counter:  time falls at a row of 65536, against v02's; at a row of 4096, where v04's kernel runs, nothing
//           moves.
// Requires: compute capability 9.0; contiguous rows.
//           - up to 64 KiB: v04_rows_per_block
//           - up to what the shared memory of 16 blocks holds: this step's kernel
//           - longer: v02_welford
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
