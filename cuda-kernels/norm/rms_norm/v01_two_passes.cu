// rms_norm v01_two_passes: a block a row, which it reads twice.
//
// Change:   one pass sums the squares, one writes.
// Why:      the definition, word for word. There is no mean, so layer_norm's v01 has a pass more.
// Counter:  dram_share stays low although dram_bytes are the least possible: a row of 4096 stays in L1
//           between the passes. Each thread loads one element at a time.
// Requires: rows that are contiguous; any length.
// Source:   Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467
// Twin:     triton-kernels/norm/rms_norm/v01_two_passes.py
#include "args.h"
#include "norm/norm.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int64_t SOME = 64;  // elements that a thread adds up in one partial sum
constexpr int64_t MOST_BLOCKS = 1 << 30;

template <typename T>
__global__ void __launch_bounds__(THREADS) rms_norm_v01_two_passes_kernel(const RmsNormArgs args) {
  __shared__ float parts[2][32];
  const int64_t N = args.N;
  int turn = 0;  // rows alternate between two sets of parts: warps may still read the other
  for (int64_t index = blockIdx.x; index < args.M; index += gridDim.x, turn ^= 1) {
    const NormRow<T> row(args, index);

    // In partial sums: one chain of thousands of squares would lose digits that PyTorch's sum keeps.
    float squares = 0.0f;
    for (int64_t start = threadIdx.x; start < N; start += SOME * THREADS) {
      float some = 0.0f;
      for (int64_t col = start; col < min(start + SOME * THREADS, N); col += THREADS) {
        const T value = row.input(col);
        if (row.added) row.added[col] = value;
        some += to_float(value) * to_float(value);
      }
      squares += some;
    }
    const float rstd = rstd_of(block_sum(squares, parts[turn]), N, args.eps);

    for (int64_t col = threadIdx.x; col < N; col += THREADS) {
      row.out[col] = row.result(to_float(row.input(col)) * rstd, col);
    }
    if (threadIdx.x == 0) args.rstd[index] = rstd;
  }
}

}  // namespace

void rms_norm_v01_two_passes(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    rms_norm_v01_two_passes_kernel<decltype(zero)>
        <<<static_cast<unsigned>(std::min(args.M, MOST_BLOCKS)), THREADS, 0, args.stream>>>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
