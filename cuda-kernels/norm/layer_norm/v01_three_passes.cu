// layer_norm v01_three_passes: a block a row, which it reads three times.
//
// Change:   one pass finds the mean, one sums the squared distances from it, one writes.
// Why:      the definition, word for word. Taking the mean of the squares minus the square of the mean would
//           save a pass, and cancel every digit where the mean is large beside the deviation.
// Counter:  dram_share stays low although dram_bytes are the least possible: a row of 4096 stays in L1
//           between the passes. Each thread loads one element at a time, and the block waits for all of its
//           warps after every pass.
// Requires: rows that are contiguous; any length.
// Source:   Ba, Kiros and Hinton, "Layer Normalization", arXiv:1607.06450
// Twin:     triton-kernels/norm/layer_norm/v01_three_passes.py
#include "args.h"
#include "norm/norm.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int64_t SOME = 64;  // elements that a thread adds up in one partial sum
constexpr int64_t MOST_BLOCKS = 1 << 30;

template <typename T>
__global__ void __launch_bounds__(THREADS) layer_norm_v01_three_passes_kernel(const LayerNormArgs args) {
  __shared__ float mean_parts[32], square_parts[32];
  const int64_t N = args.N;
  for (int64_t index = blockIdx.x; index < args.M; index += gridDim.x) {
    const NormRow<T> row(args, index);

    float sum = 0.0f;
    for (int64_t col = threadIdx.x; col < N; col += THREADS) {
      const T value = row.input(col);
      if (row.added) row.added[col] = value;
      sum += to_float(value);
    }
    const float mean = block_sum(sum, mean_parts) / static_cast<float>(N);

    // In partial sums: one chain of thousands of squares would lose digits that PyTorch's sum keeps.
    float squares = 0.0f;
    for (int64_t start = threadIdx.x; start < N; start += SOME * THREADS) {
      float some = 0.0f;
      for (int64_t col = start; col < min(start + SOME * THREADS, N); col += THREADS) {
        const float distance = to_float(row.input(col)) - mean;
        some += distance * distance;
      }
      squares += some;
    }
    const float rstd = rstd_of(block_sum(squares, square_parts), N, args.eps);

    for (int64_t col = threadIdx.x; col < N; col += THREADS) {
      row.out[col] = row.result((to_float(row.input(col)) - mean) * rstd, col);
    }
    if (threadIdx.x == 0) {
      args.mean[index] = mean;
      args.rstd[index] = rstd;
    }
  }
}

}  // namespace

void layer_norm_v01_three_passes(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    layer_norm_v01_three_passes_kernel<decltype(zero)>
        <<<std::min(args.M, MOST_BLOCKS), THREADS, 0, args.stream>>>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
