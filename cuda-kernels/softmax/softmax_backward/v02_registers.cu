// softmax_backward v02_registers: register-resident rows, each read once.
//
// Change:   a thread loads all of its elements of dout and y before it looks at the first, and keeps them.
// Why:      the loads of a thread no longer wait for each other, and none is repeated. Two rows need twice
//           the registers of the forward pass, so a row may be half as long.
// Counter:  time falls, and dram_share rises.
// Requires: contiguous rows of up to 8192 elements.
// Source:   "persistent" softmax of PyTorch, aten/src/ATen/native/cuda/PersistentSoftmax.cuh
// Twin:     triton-kernels/softmax/softmax_backward/v02_registers.py
#include "args.h"
#include "gradient.cuh"

namespace {

constexpr int FEW_THREADS = 256, FEW_ITEMS = 16;    // items: elements a thread, of each row
constexpr int MANY_THREADS = 1024, MANY_ITEMS = 8;  // as many as fit 64 registers a thread
constexpr int LONGEST_ROW = MANY_THREADS * MANY_ITEMS;
static_assert(LONGEST_ROW > FEW_THREADS * FEW_ITEMS);

// dout, y: [M, N], rows stride_dm and stride_ym apart; out: [M, N]. N <= THREADS * ITEMS.
template <typename T, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    softmax_backward_v02_registers_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                          T* __restrict__ out, int N, int64_t stride_dm, int64_t stride_ym,
                                          bool log) {
  __shared__ float parts[32];
  const int64_t row = blockIdx.x;
  const T* row_dout = dout + row * stride_dm;
  const T* row_y = y + row * stride_ym;
  T* row_out = out + row * N;

  T held_dout[ITEMS], held_y[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int col = i * THREADS + threadIdx.x;
    held_dout[i] = col < N ? row_dout[col] : from_float<T>(0.0f);
    held_y[i] = col < N ? row_y[col] : from_float<T>(0.0f);
  }

  float mine = 0.0f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) mine += term_of(to_float(held_dout[i]), to_float(held_y[i]), log);
  const float sum = block_sum(mine, parts);

  const auto write = [&](auto gradient) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = i * THREADS + threadIdx.x;
      if (col < N) row_out[col] = from_float<T>(gradient(to_float(held_dout[i]), to_float(held_y[i])));
    }
  };
  if (log) {
    write(LogSoftmaxGradient{sum});
  } else {
    write(SoftmaxGradient{sum});
  }
}

template <typename T, int THREADS, int ITEMS>
void launch(const SoftmaxBackwardArgs& args) {
  launch_rows(args.M, [&](int64_t first, int64_t rows) {
    softmax_backward_v02_registers_kernel<T, THREADS, ITEMS><<<rows, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.dout) + first * args.stride_dm,
        static_cast<const T*>(args.y) + first * args.stride_ym, static_cast<T*>(args.out) + first * args.N,
        static_cast<int>(args.N), args.stride_dm, args.stride_ym, args.log);
  });
}

}  // namespace

void softmax_backward_v02_registers(const SoftmaxBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  if (args.N > LONGEST_ROW) {
    throw std::runtime_error("dout has rows of " + std::to_string(args.N) +
                             " elements, v02_registers holds " + std::to_string(LONGEST_ROW) +
                             ": take v01_two_passes or v04_cluster");
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
