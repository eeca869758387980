// vector_add v03_vectorized: each access is 16 bytes wide.
//
// Change:   a thread loads, adds and stores a vector of 16 bytes instead of one element. The few elements
//           behind the last whole vector are added as in v02.
// Why:      a quarter of the load and store instructions for the same bytes, an eighth in bf16.
// Counter:  sectors_per_load rises from 4 to 16; instructions fall.
// Requires: contiguous tensors of any size; unless all three addresses are multiples of 16 bytes, there are
//           no whole vectors and every element is added as in v02.
// Twin:     triton-kernels/elementwise/vector_add/v03_vectorized.py
#include <algorithm>

#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;
constexpr int BLOCKS_PER_SM = 8;  // 2048 threads, all that an SM holds

// a, b, out: [n]. The first `vectors` * 16 bytes of each are accessed 16 bytes at a time. No __restrict__:
// out may be a or b.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    vector_add_v03_vectorized_kernel(const T* a, const T* b, T* out, int64_t n, int64_t vectors) {
  using Vector = Pack<T>;
  const Vector* a_vectors = reinterpret_cast<const Vector*>(a);
  const Vector* b_vectors = reinterpret_cast<const Vector*>(b);
  Vector* out_vectors = reinterpret_cast<Vector*>(out);

  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = first; i < vectors; i += stride) out_vectors[i] = a_vectors[i] + b_vectors[i];

  // The remainder, one element a thread.
  for (int64_t i = vectors * Vector::SIZE + first; i < n; i += stride) {
    out[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
  }
}

void vector_add_v03_vectorized(const VectorAddArgs& args) {
  if (args.n == 0) return;
  const int64_t one_wave = multiprocessor_count() * BLOCKS_PER_SM;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t vectors = aligned_to_16_bytes(args.a, args.b, args.out) ? args.n / Pack<T>::SIZE : 0;
    const int64_t grid = std::min(cdiv(args.n, THREADS * Pack<T>::SIZE), one_wave);
    vector_add_v03_vectorized_kernel<<<grid, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.a), static_cast<const T*>(args.b), static_cast<T*>(args.out), args.n,
        vectors);
  });
  CUDA_CHECK(cudaGetLastError());
}
