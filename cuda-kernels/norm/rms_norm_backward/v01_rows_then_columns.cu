// rms_norm_backward v01_rows_then_columns: one launch along the rows, one along the columns.
//
// Change:   for dx, a block takes a row and reads it twice: for its sum, and to write. For dweight, a thread
//           takes a column over a slice of the rows; a third launch adds the slices.
// Why:      the definition, word for word: dx needs the sum of a row, dweight that of a column. Both matrices
//           travel from device memory twice.
// Counter:  both matrices are read from DRAM twice, so dram_bytes are five thirds of the least possible.
// Requires: rows that are contiguous; any length.
// Source:   the derivative of x times rstd
// Twin:     triton-kernels/norm/rms_norm_backward/v01_rows_then_columns.py
#include "args.h"
#include "norm/norm_backward.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int64_t MOST_BLOCKS = 1 << 30;
constexpr int COLUMNS = 256;      // of a block that sums columns, one column a thread
constexpr int MOST_SLICES = 128;  // of the rows

template <typename T>
__device__ float unit_of(const RmsNormBackwardArgs& args, int64_t row, int64_t col) {
  const float x = to_float(static_cast<const T*>(args.x)[row * args.stride_xm + col]);
  return x * args.rstd[row];
}
template <typename T>
__device__ float dout_of(const RmsNormBackwardArgs& args, int64_t row, int64_t col) {
  return to_float(static_cast<const T*>(args.dout)[row * args.stride_dm + col]);
}

// dx; a block takes a row.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    rms_norm_backward_v01_rows_then_columns_kernel(const RmsNormBackwardArgs args) {
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
    rms_norm_backward_v01_rows_then_columns_columns_kernel(const RmsNormBackwardArgs args, int slices,
                                                           float* workspace) {
  const int64_t N = args.N, col = static_cast<int64_t>(blockIdx.x) * COLUMNS + threadIdx.x;
  const int slice = blockIdx.y;
  if (col >= N) return;
  float of_weight = 0.0f;
  for (int64_t row = slice; row < args.M; row += slices) {
    const float dout = dout_of<T>(args, row, col);
    of_weight += dout * unit_of<T>(args, row, col);
  }
  partial_sums(workspace, 0, slices, N, slice)[col] = of_weight;
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    rms_norm_backward_v01_rows_then_columns_sum_kernel(const float* workspace, int groups, int64_t N,
                                                       T* dweight, T* dbias) {
  add_partial_sums(workspace, groups, N, dweight, dbias);
}

}  // namespace

void rms_norm_backward_v01_rows_then_columns(const RmsNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args.M > 0) {
      rms_norm_backward_v01_rows_then_columns_kernel<T>
          <<<static_cast<unsigned>(std::min(args.M, MOST_BLOCKS)), THREADS, 0, args.stream>>>(args);
    }
    if (args.dweight == nullptr && args.dbias == nullptr) return;
    const int slices = static_cast<int>(std::clamp<int64_t>(args.M, 1, MOST_SLICES));
    launch_with_sums<T>(
        args, slices, false,
        [&](float* workspace) {
          const dim3 grid(static_cast<unsigned>(cdiv(args.N, COLUMNS)), slices);
          rms_norm_backward_v01_rows_then_columns_columns_kernel<T>
              <<<grid, COLUMNS, 0, args.stream>>>(args, slices, workspace);
        },
        rms_norm_backward_v01_rows_then_columns_sum_kernel<T>);
  });
  CUDA_CHECK(cudaGetLastError());
}
