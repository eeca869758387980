// layer_norm_backward v03_pipelined: the next row is loaded while one is worked on.
//
// Change:   a thread issues the loads of its packs of the next row, to registers of their own, before it
//           works on this row.
// Why:      v02's blocks wait for a row, sum it, write it, and have no load under way meanwhile. With the
//           next row's loads under way, a wait at the block's barrier no longer idles the memory. Trials,
//           also of shared memory filled by bulk copies, ran before the step was recorded.
// Counter:  dram_share rises.
// Requires: contiguous rows of up to 16 KiB.
// Source:   CUDA C++ Best Practices Guide, "Asynchronous Copy from Global Memory to Shared Memory", with
//           registers instead: shared memory, filled by bulk copies, was slower here, as every element is
//           read anew.
// Twin:     triton-kernels/norm/layer_norm_backward/v03_pipelined.py
#include "args.h"
#include "norm/norm_backward.cuh"

void layer_norm_backward_v01_rows_then_columns(const LayerNormBackwardArgs& args);

namespace {

constexpr int PACKS = 2, THREADS = 544;     // of a block that takes a row
constexpr int64_t LARGEST_ROW = 16 * 1024;  // bytes of x's row
static_assert(THREADS * PACKS >= LARGEST_ROW / 16 + 1, "a skewed row needs a pack more");

// A block takes a row, of at most blockDim.x * PACKS packs.
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(THREADS)
    layer_norm_backward_v03_pipelined_kernel(const LayerNormBackwardArgs args, int period, int blocks,
                                             int each, float* workspace) {
  backward_by_cluster<T, PACKS, true, WHOLE, true>(args, period, blocks, each, workspace);
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    layer_norm_backward_v03_pipelined_sum_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                                 T* dbias) {
  add_partial_sums(workspace, groups, N, dweight, dbias);
}

template <typename T, bool WHOLE>
void launch(const LayerNormBackwardArgs& args) {
  const bool launched = launch_parts<T>(args, layer_norm_backward_v03_pipelined_kernel<T, WHOLE>, 1, PACKS,
                                        true, layer_norm_backward_v03_pipelined_sum_kernel<T>);
  if (!launched) layer_norm_backward_v01_rows_then_columns(args);  // no rows, or too few blocks
}

}  // namespace

void layer_norm_backward_v03_pipelined(const LayerNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (bytes > LARGEST_ROW) {
      throw std::runtime_error("dout has rows of " + std::to_string(bytes) + " bytes, v03_pipelined holds " +
                               std::to_string(LARGEST_ROW) + ": take v01_rows_then_columns or v04_cluster");
    }
    are_whole<T>(args) ? launch<T, true>(args) : launch<T, false>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
