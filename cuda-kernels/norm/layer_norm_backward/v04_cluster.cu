// layer_norm_backward v04_cluster: the blocks of a cluster share a split row.
//
// Change:   a row of more than 16 KiB is split over the blocks of a cluster, which send each other their two
//           sums through DSMEM. Each block keeps the sums of its own columns for dweight and dbias.
// Why:      two rows of 256 K elements and the sums of as many columns are 3 MiB: the registers of sixteen
//           SMs hold that, those of one do not. Every element is read once, and a block sends two numbers a
//           row. Rows of up to 16 KiB keep v03's kernel. Trials ran before.
// Counter:  time falls at a row of 65536, against v01's; at a row of 4096, where v03's kernel runs, nothing
//           moves.
// Requires: compute capability 9.0; contiguous rows.
//           - up to 512 KiB if all rows start and end at multiples of 16 bytes, else 256 KiB: this step's
//             kernels
//           - longer: v01_rows_then_columns
// Source:   CUDA C++ Programming Guide, "Distributed Shared Memory"; PTX ISA, "st.async"
// Gap:      Triton gives a program no access to another one's shared memory.
#include "args.h"
#include "norm/norm_backward.cuh"

void layer_norm_backward_v01_rows_then_columns(const LayerNormBackwardArgs& args);

namespace {

// One block takes a row of up to SHORT_ROW packs; of a longer row a block takes up to PART packs. If 16
// blocks do not hold a row so, blocks have LONG_THREADS, without registers to load the next row ahead.
constexpr int SHORT_PACKS = 2, SHORT_THREADS = 544, SHORT_ROW = 1025;
constexpr int PACKS = 4, PART_THREADS = 256, PART = PACKS * PART_THREADS, LONG_THREADS = 512;
static_assert(SHORT_PACKS * SHORT_THREADS >= SHORT_ROW);

// A cluster takes a row, of which a block has at most blockDim.x * PACKS packs.
template <typename T, int PACKS, int THREADS, bool WHOLE, bool PREFETCH>
__global__ void __launch_bounds__(THREADS)
    layer_norm_backward_v04_cluster_kernel(const LayerNormBackwardArgs args, int period, int blocks, int each,
                                           float* workspace) {
  backward_by_cluster<T, PACKS, true, WHOLE, PREFETCH>(args, period, blocks, each, workspace);
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    layer_norm_backward_v04_cluster_sum_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                               T* dbias) {
  add_partial_sums(workspace, groups, N, dweight, dbias);
}

template <typename T, bool WHOLE>
bool launch(const LayerNormBackwardArgs& args) {
  const auto sum_kernel = layer_norm_backward_v04_cluster_sum_kernel<T>;
  const int64_t packs = packs_of<T>(args);
  if (packs <= SHORT_ROW) {
    return launch_parts<T>(args,
                           layer_norm_backward_v04_cluster_kernel<T, SHORT_PACKS, SHORT_THREADS, WHOLE, true>,
                           1, SHORT_PACKS, true, sum_kernel);
  }
  int blocks = 2;
  while (blocks < MOST_CLUSTER_BLOCKS && packs > blocks * PART) blocks *= 2;
  if (packs <= blocks * PART) {
    return launch_parts<T>(args, layer_norm_backward_v04_cluster_kernel<T, PACKS, PART_THREADS, WHOLE, true>,
                           blocks, PACKS, true, sum_kernel);
  }
  // Misaligned rows need masks, beside which the sums of so many columns do not fit the registers.
  if constexpr (WHOLE) {
    if (packs > blocks * PACKS * LONG_THREADS) return false;
    return launch_parts<T>(args, layer_norm_backward_v04_cluster_kernel<T, PACKS, LONG_THREADS, WHOLE, false>,
                           blocks, PACKS, true, sum_kernel);
  }
  return false;
}

}  // namespace

void layer_norm_backward_v04_cluster(const LayerNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!(are_whole<T>(args) ? launch<T, true>(args) : launch<T, false>(args)))
      layer_norm_backward_v01_rows_then_columns(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
