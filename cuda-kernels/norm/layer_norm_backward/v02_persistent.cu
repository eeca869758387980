// layer_norm_backward v02_persistent: a persistent kernel keeps the sums of its columns in registers.
//
// Change:   as many blocks as run at once take one row after the other, and hold each in registers: x and
//           dout are read once, for dx, dweight and dbias. A thread has the same columns of every row, and
//           sums them for dweight and dbias in registers. A second launch adds the blocks' partial sums,
//           always in the same order.
// Why:      v01 reads both matrices twice. Sums in registers need no traffic, and the partial sums of a few
//           hundred blocks are little to add; without atomics every run gives the same bits. But a block
//           waits for its row, then for its sums, before it asks for the next row.
// Counter:  dram_bytes fall, since three matrices travel instead of five; time follows.
// Requires: contiguous rows of up to 16 KiB. If rows have several skews, blocks get equal shares of the rows
//           in the order of their skew, and start columns and sums anew where a share comes to another skew.
// Source:   partial sums of Triton's tutorial "Layer Normalization" and of Apex's ln_bwd_semi_cuda_kernel.cu
// Twin:     triton-kernels/norm/layer_norm_backward/v02_persistent.py
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
    layer_norm_backward_v02_persistent_kernel(const LayerNormBackwardArgs args, int period, int blocks,
                                              int each, float* workspace) {
  backward_by_cluster<T, PACKS, true, WHOLE, false>(args, period, blocks, each, workspace);
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    layer_norm_backward_v02_persistent_sum_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                                  T* dbias) {
  add_partial_sums(workspace, groups, N, dweight, dbias);
}

template <typename T, bool WHOLE>
void launch(const LayerNormBackwardArgs& args) {
  const bool launched = launch_parts<T>(args, layer_norm_backward_v02_persistent_kernel<T, WHOLE>, 1, PACKS,
                                        true, layer_norm_backward_v02_persistent_sum_kernel<T>);
  if (!launched) layer_norm_backward_v01_rows_then_columns(args);  // no rows, or too few blocks
}

}  // namespace

void layer_norm_backward_v02_persistent(const LayerNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (bytes > LARGEST_ROW) {
      throw std::runtime_error("dout has rows of " + std::to_string(bytes) + " bytes, v02_persistent holds " +
                               std::to_string(LARGEST_ROW) + ": take v01_rows_then_columns or v04_cluster");
    }
    are_whole<T>(args) ? launch<T, true>(args) : launch<T, false>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
