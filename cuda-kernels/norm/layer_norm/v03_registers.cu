// layer_norm v03_registers: the row is register-resident: it is read once.
//
// Change:   a thread loads all of its elements before it uses the first one, and keeps them in registers. The
//           mean, then the squared distances from it, and the result are computed from registers.
// Why:      the loads no longer wait for each other, and none is repeated. A second pass over registers costs
//           less than Welford's divisions, and its error is smaller. The registers of a block bound the
//           length of a row.
// Counter:  time falls.
// Requires: contiguous rows of up to 16384 elements.
// Source:   "persistent" softmax of PyTorch, aten/src/ATen/native/cuda/PersistentSoftmax.cuh
// Twin:     triton-kernels/norm/layer_norm/v03_registers.py
#include "args.h"
#include "norm/norm.cuh"

namespace {

constexpr int FEW_THREADS = 256, FEW_ITEMS = 32;     // elements a thread
constexpr int MANY_THREADS = 1024, MANY_ITEMS = 16;  // as many as 64 registers a thread hold
constexpr int LONGEST_ROW = MANY_THREADS * MANY_ITEMS;
constexpr int64_t MOST_BLOCKS = 1 << 30;
static_assert(LONGEST_ROW > FEW_THREADS * FEW_ITEMS);

// N <= THREADS * ITEMS.
template <typename T, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS) layer_norm_v03_registers_kernel(const LayerNormArgs args) {
  __shared__ float mean_parts[32], square_parts[32];
  const int N = static_cast<int>(args.N);
  for (int64_t index = blockIdx.x; index < args.M; index += gridDim.x) {
    const NormRow<T> row(args, index);

    T held[ITEMS];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = i * THREADS + threadIdx.x;
      held[i] = col < N ? row.input(col) : from_float<T>(0.0f);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = i * THREADS + threadIdx.x;
      if (row.added && col < N) row.added[col] = held[i];
      sum += to_float(held[i]);
    }
    const float mean = block_sum(sum, mean_parts) / static_cast<float>(N);

    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const float distance = to_float(held[i]) - mean;
      if (i * THREADS + static_cast<int>(threadIdx.x) < N) squares += distance * distance;
    }
    const float rstd = rstd_of(block_sum(squares, square_parts), N, args.eps);

#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = i * THREADS + threadIdx.x;
      if (col < N) row.out[col] = row.result((to_float(held[i]) - mean) * rstd, col);
    }
    if (threadIdx.x == 0) {
      args.mean[index] = mean;
      args.rstd[index] = rstd;
    }
  }
}

template <typename T, int THREADS, int ITEMS>
void launch(const LayerNormArgs& args) {
  layer_norm_v03_registers_kernel<T, THREADS, ITEMS>
      <<<std::min(args.M, MOST_BLOCKS), THREADS, 0, args.stream>>>(args);
}

}  // namespace

void layer_norm_v03_registers(const LayerNormArgs& args) {
  if (args.M == 0) return;
  if (args.N > LONGEST_ROW) {
    throw std::runtime_error("x has rows of " + std::to_string(args.N) + " elements, v03_registers holds " +
                             std::to_string(LONGEST_ROW) + ": take v02_welford or v05_cluster");
  }
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args.N <= FEW_THREADS * FEW_ITEMS) {
      launch<T, FEW_THREADS, FEW_ITEMS>(args);
    } else {
      launch<T, MANY_THREADS, MANY_ITEMS>(args);
    }
  });
  CUDA_CHECK(cudaGetLastError());
}
