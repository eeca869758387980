// layer_norm_backward v01_rows_then_columns: one launch along the rows, one along the columns.
//
// Change:   for dx, a block takes a row and reads it twice: for its two sums, and to write. For dweight and
//           dbias, a thread takes a column over a slice of the rows; a third launch adds the slices.
// Why:      the definition, word for word: dx needs the sums of a row, dweight and dbias those of a column.
//           Both matrices travel from device memory twice: five matrices instead of three.
// Counter:  both matrices are read from DRAM twice, so dram_bytes are five thirds of the least possible.
// Requires: rows that are contiguous; any length.
// Source:   the derivative of layer normalisation
// Twin:     triton-kernels/norm/layer_norm_backward/v01_rows_then_columns.py
#include "args.h"
#include "norm/norm_backward.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int64_t MOST_BLOCKS = 1 << 30;
constexpr int COLUMNS = 256;      // of a block that sums columns, one column a thread
constexpr int MOST_SLICES = 128;  // of the rows

template <typename T>
__device__ float unit_of(const LayerNormBackwardArgs& args, int64_t row, int64_t col) {
  const float x = to_float(static_cast<const T*>(args.x)[row * args.stride_xm + col]);
  return (x - args.mean[row]) * args.rstd[row];
}
template <typename T>
__device__ float dout_of(const LayerNormBackwardArgs& args, int64_t row, int64_t col) {
  return to_float(static_cast<const T*>(args.dout)[row * args.stride_dm + col]);
}

// dx; a block takes a row.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    layer_norm_backward_v01_rows_then_columns_kernel(const LayerNormBackwardArgs args) {
  __shared__ GradientSums parts[2][32];
  const int64_t N = args.N;
  const auto* weight = static_cast<const T*>(args.weight);
  const auto g_of = [&](int64_t row, int64_t col) {
    return dout_of<T>(args, row, col) * (weight ? to_float(weight[col]) : 1.0f);
  };
  int turn = 0;  // rows alternate between two sets of parts: warps may still read the other
  for (int64_t row = blockIdx.x; row < args.M; row += gridDim.x, turn ^= 1) {
    GradientSums sums = {};
    for (int64_t col = threadIdx.x; col < N; col += THREADS) {
      const float g = g_of(row, col);
      sums.product += g * unit_of<T>(args, row, col);
      sums.plain += g;
    }
    sums = block_sum(sums, parts[turn]);
    const float of_unit = sums.product / static_cast<float>(N), of_all = sums.plain / static_cast<float>(N);
    for (int64_t col = threadIdx.x; col < N; col += THREADS) {
      float dx = args.rstd[row] * (g_of(row, col) - of_all - unit_of<T>(args, row, col) * of_unit);
      if (args.dadded) dx += to_float(static_cast<const T*>(args.dadded)[row * args.stride_am + col]);
      static_cast<T*>(args.dx)[row * N + col] = from_float<T>(dx);
    }
  }
}

// The column sums of a slice of the rows; a thread takes a column.
template <typename T>
__global__ void __launch_bounds__(COLUMNS)
    layer_norm_backward_v01_rows_then_columns_columns_kernel(const LayerNormBackwardArgs args, int slices,
                                                             float* workspace) {
  const int64_t N = args.N, col = static_cast<int64_t>(blockIdx.x) * COLUMNS + threadIdx.x;
  const int slice = blockIdx.y;
  if (col >= N) return;
  float of_weight = 0.0f, of_bias = 0.0f;
  for (int64_t row = slice; row < args.M; row += slices) {
    const float dout = dout_of<T>(args, row, col);
    of_weight += dout * unit_of<T>(args, row, col);
    of_bias += dout;
  }
  partial_sums(workspace, 0, slices, N, slice)[col] = of_weight;
  partial_sums(workspace, 1, slices, N, slice)[col] = of_bias;
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    layer_norm_backward_v01_rows_then_columns_sum_kernel(const float* workspace, int groups, int64_t N,
                                                         T* dweight, T* dbias) {
  add_partial_sums(workspace, groups, N, dweight, dbias);
}

}  // namespace

void layer_norm_backward_v01_rows_then_columns(const LayerNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args.M > 0) {
      layer_norm_backward_v01_rows_then_columns_kernel<T>
          <<<static_cast<unsigned>(std::min(args.M, MOST_BLOCKS)), THREADS, 0, args.stream>>>(args);
    }
    if (args.dweight == nullptr && args.dbias == nullptr) return;
    const int slices = static_cast<int>(std::clamp<int64_t>(args.M, 1, MOST_SLICES));
    launch_with_sums<T>(
        args, slices, true,
        [&](float* workspace) {
          const dim3 grid(static_cast<unsigned>(cdiv(args.N, COLUMNS)), slices);
          layer_norm_backward_v01_rows_then_columns_columns_kernel<T>
              <<<grid, COLUMNS, 0, args.stream>>>(args, slices, workspace);
        },
        layer_norm_backward_v01_rows_then_columns_sum_kernel<T>);
  });
  CUDA_CHECK(cudaGetLastError());
}
