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

// A persistent block takes row after row, of at most blockDim.x * PACKS packs, in registers; the weights are
// in shared memory. It leaves one set of partial sums for every kind of rows in its share.
template <typename T, Alignment ALIGNMENT>
__global__ void __launch_bounds__(THREADS)
    layer_norm_backward_v02_persistent_kernel(const LayerNormBackwardArgs args, int period,
                                              float* workspace) {
  extern __shared__ uint4 weights[];     // [PACKS, blockDim.x], every thread's own
  __shared__ GradientSums warps[2][32];  // rows alternate: warps may still read the other
  const int N = static_cast<int>(args.N), block = blockIdx.x, blocks = gridDim.x;
  const RowKinds kinds{args.M, ALIGNMENT == Alignment::PACK ? 1 : period};
  const auto share = [&](int of) { return args.M * of / blocks; };  // begins where the one before ends
  const int first_kind = kinds.kind(share(block)), last_kind = kinds.kind(share(block + 1));

  uint32_t turn = 0;
  for (int kind = first_kind; kind <= last_kind; ++kind) {
    // The rows are index, index + step, ... below `limit`.
    const auto row_at = [&](int64_t place) { return kind + (place - kinds.start(kind)) * kinds.period; };
    const int step = kinds.period > 1 ? kinds.period : blocks;
    int64_t index = block, limit = args.M;
    if (kinds.period > 1) {
      index = row_at(max(share(block), kinds.start(kind)));
      limit = row_at(min(share(block + 1), kinds.start(kind + 1)));
    }
    const T* x = static_cast<const T*>(args.x);
    const T* dout = static_cast<const T*>(args.dout);
    GradientColumns<T, PACKS, Norm::LAYER, ALIGNMENT> columns(N, skew_of(x + kind * args.stride_xm),
                                                              threadIdx.x, blockDim.x);
    const auto first_of = [&](int i) { return columns.first_of(i); };
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      weights[i * blockDim.x + threadIdx.x] = load_weights<T>(args.weight, 0, first_of(i), N).words;
    }
    const auto weight_of = [&](int i) { return Pack<T>{weights[i * blockDim.x + threadIdx.x]}; };

    HeldOperands<T, PACKS> row;
    float mean = 0.0f, rstd = 0.0f;
    const auto load = [&](HeldOperands<T, PACKS>& rows, int64_t at) {
      if (at >= limit) return;
      const bool at_end = is_at_end<T>(args.M, at, args.stride_xm, args.stride_dm);
      rows.template load<ALIGNMENT>(x + at * args.stride_xm, dout + at * args.stride_dm, N, at_end, first_of);
      mean = args.mean[at];
      rstd = args.rstd[at];
    };
    for (; index < limit; index += step, ++turn) {
      load(row, index);
      row.template finish_load<ALIGNMENT>(N, first_of);
      const GradientSums sums = block_sum(columns.add(row, mean, rstd, weight_of), warps[turn % 2]);
      const T* added = static_cast<const T*>(args.dadded) + index * args.stride_am;
      columns.write(
          row, static_cast<T*>(args.dx) + index * args.N, mean, rstd,
          {sums.product / static_cast<float>(N), sums.plain / static_cast<float>(N)}, weight_of,
          [&](int, int first) { return load_added<ALIGNMENT>(args.dadded ? added : nullptr, first, N); });
    }
    if (workspace == nullptr) continue;
    // block + kind numbers the sets of partial sums: the next share starts with this one's last kind or the
    // one after it, so no number comes twice.
    const int group = block + kind, groups = blocks + kinds.period - 1;
    columns.for_each([&](int col, float of_weight, float of_bias) {
      partial_sums(workspace, 0, groups, args.N, group)[col] = of_weight;
      partial_sums(workspace, 1, groups, args.N, group)[col] = of_bias;
    });
  }
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    layer_norm_backward_v02_persistent_sum_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                                  T* dbias) {
  add_partial_sums(workspace, groups, N, dweight, dbias);
}

template <typename T, Alignment ALIGNMENT>
void launch(const LayerNormBackwardArgs& args) {
  const bool launched = launch_persistent<T>(args, layer_norm_backward_v02_persistent_kernel<T, ALIGNMENT>, 1,
                                             PACKS, true, layer_norm_backward_v02_persistent_sum_kernel<T>);
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
    are_whole<T>(args) ? launch<T, Alignment::PACK>(args) : launch<T, Alignment::ELEMENT>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
