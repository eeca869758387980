// matmul_bf16 v01_naive: one element at a time, no tensor cores.
//
// Change:   none yet, this is where the ladder starts. A block of 32 x 32 threads computes 32 x 32 elements.
// Why:      the formula as it is written, with the lanes along the columns so that loads are coalesced. The
//           tensor cores, which hold nearly all of this chip's arithmetic, stay idle.
// Counter:  tensor_pipe is 0.
// Requires: a and b of any strides, out row-major. Sums are fp32 and rounded once.
// Twin:     triton-kernels/matmul/matmul_bf16/v01_naive.py
#include "args.h"
#include "lib/common.cuh"

constexpr int BLOCK_M = 32;
constexpr int BLOCK_N = 32;

static_assert(BLOCK_M * BLOCK_N <= 1024, "one thread an element, and a block has 1024 at most");

template <typename T>
__global__ void __launch_bounds__(BLOCK_M* BLOCK_N) matmul_bf16_v01_naive_kernel(MatmulBf16Args args) {
  // The grid is flat, since its y and z would end at 65535.
  const int64_t blocks_n = cdiv(args.N, BLOCK_N);
  const int64_t row = blockIdx.x / blocks_n * BLOCK_M + threadIdx.y;
  const int64_t col = blockIdx.x % blocks_n * BLOCK_N + threadIdx.x;
  if (row >= args.M || col >= args.N) return;

  const T* a = static_cast<const T*>(args.a) + row * args.stride_am;  // [K]
  const T* b = static_cast<const T*>(args.b) + col * args.stride_bn;  // [K]
  float sum = 0.0f;
  for (int64_t k = 0; k < args.K; ++k)
    sum += to_float(a[k * args.stride_ak]) * to_float(b[k * args.stride_bk]);
  static_cast<T*>(args.out)[row * args.N + col] = from_float<T>(sum);
}

void matmul_bf16_v01_naive(const MatmulBf16Args& args) {
  if (args.M == 0 || args.N == 0) return;
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  const dim3 threads(BLOCK_N, BLOCK_M);
  if (args.dtype == Dtype::bf16) {
    matmul_bf16_v01_naive_kernel<__nv_bfloat16><<<grid, threads, 0, args.stream>>>(args);
  } else {
    matmul_bf16_v01_naive_kernel<__half><<<grid, threads, 0, args.stream>>>(args);
  }
  CUDA_CHECK(cudaGetLastError());
}
