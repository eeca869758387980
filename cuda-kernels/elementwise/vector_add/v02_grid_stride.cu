// vector_add v02_grid_stride: a grid of one wave strides over the vector.
//
// Change:   as many blocks as the SMs hold at once; each thread takes every so-many-th element.
// Why:      set-up is paid once a thread, not once an element, and the grid no longer grows with n. The
//           memory system sees the same requests, so time should not move.
// Counter:  time should not move; sectors_per_load stays 4.
// Requires: contiguous tensors of any size and alignment.
// Twin:     triton-kernels/elementwise/vector_add/v02_grid_stride.py
#include <algorithm>

#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;
constexpr int BLOCKS_PER_SM = 8;  // 2048 threads, all that an SM holds

// a, b, out: [n]. No __restrict__: out may be a or b.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    vector_add_v02_grid_stride_kernel(const T* a, const T* b, T* out, int64_t n) {
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = first; i < n; i += stride) out[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
}

void vector_add_v02_grid_stride(const VectorAddArgs& args) {
  if (args.n == 0) return;
  const int64_t one_wave = multiprocessor_count() * BLOCKS_PER_SM;
  const int64_t grid = std::min(cdiv(args.n, THREADS), one_wave);
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    vector_add_v02_grid_stride_kernel<<<grid, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.a), static_cast<const T*>(args.b), static_cast<T*>(args.out), args.n);
  });
  CUDA_CHECK(cudaGetLastError());
}
