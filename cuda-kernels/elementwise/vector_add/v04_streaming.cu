// vector_add v04_streaming: several independent 16-byte loads in flight a thread, with streaming hints.
//
// Change:   a thread loads two vectors of each operand before it adds any, instead of going round a loop, and
//           the grid covers the vector again; loads and stores are marked as streaming (evict first).
// Why:      all four loads are issued before the first add needs one, so one memory latency is paid for all
//           of them; evict-first tells the caches that nothing here is read twice. Blocks that loop drift
//           apart and end apart; blocks of one tile each are dealt out in order, to whichever SM is free.
// Counter:  time falls, and dram_share rises.
// Requires: contiguous tensors of any size; unless all three addresses are multiples of 16 bytes, there are
//           no whole vectors and every element is added as in v02.
// Twin:     triton-kernels/elementwise/vector_add/v04_streaming.py
#include "args.h"
#include "lib/common.cuh"

constexpr int THREADS = 256;

// a, b, out: [n]. The first `vectors` * 16 bytes of each are accessed 16 bytes at a time. No __restrict__:
// out may be a or b.
template <int UNROLL, typename T>
__global__ void __launch_bounds__(THREADS)
    vector_add_v04_streaming_kernel(const T* a, const T* b, T* out, int64_t n, int64_t vectors) {
  using Vector = Pack<T>;
  const Vector* a_vectors = reinterpret_cast<const Vector*>(a);
  const Vector* b_vectors = reinterpret_cast<const Vector*>(b);
  Vector* out_vectors = reinterpret_cast<Vector*>(out);

  // A block's tile is UNROLL rows of THREADS vectors, so that each row is one contiguous access of the block.
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t i = int64_t{blockIdx.x} * (THREADS * UNROLL) + threadIdx.x;
  Vector a_loaded[UNROLL], b_loaded[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    if (i + u * THREADS < vectors) {
      a_loaded[u].words = __ldcs(&a_vectors[i + u * THREADS].words);
      b_loaded[u].words = __ldcs(&b_vectors[i + u * THREADS].words);
    }
  }
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    if (i + u * THREADS < vectors) {
      __stcs(&out_vectors[i + u * THREADS].words, (a_loaded[u] + b_loaded[u]).words);
    }
  }

  // The remainder, one element a thread.
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = vectors * Vector::SIZE + first; i < n; i += stride) {
    out[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
  }
}

template <int UNROLL, typename T>
static void launch(const VectorAddArgs& args) {
  const int64_t vectors = aligned_to_16_bytes(args.a, args.b, args.out) ? args.n / Pack<T>::SIZE : 0;
  const int64_t grid = cdiv(args.n, THREADS * UNROLL * Pack<T>::SIZE);
  vector_add_v04_streaming_kernel<UNROLL>
      <<<grid, THREADS, 0, args.stream>>>(static_cast<const T*>(args.a), static_cast<const T*>(args.b),
                                          static_cast<T*>(args.out), args.n, vectors);
}

void vector_add_v04_streaming(const VectorAddArgs& args) {
  if (args.n == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    // A small vector is faster spread over all SMs than loaded deeply by some.
    const bool deep = args.n / Pack<T>::SIZE >= int64_t{2} * 2 * THREADS * multiprocessor_count();
    deep ? launch<2, T>(args) : launch<1, T>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
