// vector_add v01_scalar: one thread adds one element.
//
// Change:   none yet, this is where the ladder starts. A block of 256 threads adds 256 elements.
// Why:      the grid alone covers the vector; a warp's 32 loads are neighbours, so access is coalesced
//           already.
// Counter:  sectors_per_load is 4 (fp32): 32 lanes of 4 bytes are four sectors of 32 bytes.
// Requires: contiguous tensors of any size and alignment.
// Twin:     triton-kernels/elementwise/vector_add/v01_scalar.py
#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;

// a, b, out: [n]. No __restrict__: out may be a or b.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    vector_add_v01_scalar_kernel(const T* a, const T* b, T* out, int64_t n) {
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i < n) out[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
}

void vector_add_v01_scalar(const VectorAddArgs& args) {
  if (args.n == 0) return;
  const int64_t grid = cdiv(args.n, THREADS);
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    vector_add_v01_scalar_kernel<<<grid, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.a), static_cast<const T*>(args.b), static_cast<T*>(args.out), args.n);
  });
  CUDA_CHECK(cudaGetLastError());
}
