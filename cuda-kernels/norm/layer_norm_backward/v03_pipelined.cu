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

// A persistent block takes row after row, of at most blockDim.x * PACKS packs, in registers; the weights are
// in shared memory. It leaves one set of partial sums for every kind of rows in its share.
template <typename T, Alignment ALIGNMENT>
__global__ void __launch_bounds__(THREADS)
    layer_norm_backward_v03_pipelined_kernel(const LayerNormBackwardArgs args, int period, float* workspace) {
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

    HeldOperands<T, PACKS> row, next;
    float next_mean = 0.0f, next_rstd = 0.0f;
    const auto load = [&](HeldOperands<T, PACKS>& rows, int64_t at) {
      if (at >= limit) return;
      const bool at_end = is_at_end<T>(args.M, at, args.stride_xm, args.stride_dm);
      rows.template load<ALIGNMENT>(x + at * args.stride_xm, dout + at * args.stride_dm, N, at_end, first_of);
      next_mean = args.mean[at];
      next_rstd = args.rstd[at];
    };
    load(next, index);

    for (; index < limit; index += step, ++turn) {
      const float mean = next_mean, rstd = next_rstd;
      row = next;  // waits for its loads
      load(next, index + step);
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
    layer_norm_backward_v03_pipelined_sum_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                                 T* dbias) {
  add_partial_sums(workspace, groups, N, dweight, dbias);
}

template <typename T, Alignment ALIGNMENT>
void launch(const LayerNormBackwardArgs& args) {
  const bool launched = launch_persistent<T>(args, layer_norm_backward_v03_pipelined_kernel<T, ALIGNMENT>, 1,
                                             PACKS, true, layer_norm_backward_v03_pipelined_sum_kernel<T>);
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
    are_whole<T>(args) ? launch<T, Alignment::PACK>(args) : launch<T, Alignment::ELEMENT>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
