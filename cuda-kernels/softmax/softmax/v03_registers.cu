// softmax v03_registers: a register-resident row, which is read once.
//
// Change:   a thread loads all of its elements before it looks at the first one, and keeps them. Maximum, sum
//           and result are computed from registers.
// Why:      the loads of a thread no longer wait for each other, and none is repeated. The registers of a
//           block now bound the length of a row.
// Counter:  time falls, and dram_share rises.
// Requires: contiguous rows of up to 16384 elements.
// Source:   "persistent" softmax of PyTorch, aten/src/ATen/native/cuda/PersistentSoftmax.cuh
// Twin:     triton-kernels/softmax/softmax/v03_registers.py
#include "args.h"
#include "online.cuh"

namespace {

constexpr int FEW_THREADS = 256, FEW_ITEMS = 32;     // items: elements a thread
constexpr int MANY_THREADS = 1024, MANY_ITEMS = 16;  // as many as fit 64 registers a thread
constexpr int LONGEST_ROW = MANY_THREADS * MANY_ITEMS;
static_assert(LONGEST_ROW > FEW_THREADS * FEW_ITEMS);

// x: [M, N], rows stride_xm apart; out: [M, N]. N <= THREADS * ITEMS.
template <typename T, int THREADS, int ITEMS>
__global__ void __launch_bounds__(THREADS)
    softmax_v03_registers_kernel(const T* __restrict__ x, T* __restrict__ out, int N, int64_t stride_xm,
                                 bool log) {
  __shared__ MaxSum parts[32];
  const int64_t row = blockIdx.x;
  const T* row_x = x + row * stride_xm;
  T* row_out = out + row * N;

  T held[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int col = i * THREADS + threadIdx.x;
    held[i] = col < N ? row_x[col] : from_float<T>(-INFINITY);
  }

  MaxSum mine;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) mine.max = fmaxf(mine.max, to_float(held[i]));
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) mine.sum += exp_of(to_float(held[i]) - origin(mine.max));
  const MaxSum whole = block_merge(mine, parts);

  const auto write = [&](auto result) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = i * THREADS + threadIdx.x;
      if (col < N) row_out[col] = from_float<T>(result(to_float(held[i])));
    }
  };
  if (log) {
    write(LogSoftmax(whole));
  } else {
    write(Softmax(whole));
  }
}

template <typename T, int THREADS, int ITEMS>
void launch(const SoftmaxArgs& args) {
  launch_rows(args.M, [&](int64_t first, int64_t rows) {
    softmax_v03_registers_kernel<T, THREADS, ITEMS><<<rows, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.x) + first * args.stride_xm, static_cast<T*>(args.out) + first * args.N,
        static_cast<int>(args.N), args.stride_xm, args.log);
  });
}

}  // namespace

void softmax_v03_registers(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  if (args.N > LONGEST_ROW) {
    throw std::runtime_error("x has rows of " + std::to_string(args.N) + " elements, v03_registers holds " +
                             std::to_string(LONGEST_ROW) + ": take v02_online or v07_cluster");
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
