// vector_add v06_bulk_tile: a block copies one tile and ends.
//
// Change:   no ring and no rounds: the grid covers the vector; a block has one tile of a and b brought in,
//           adds it in place in shared memory and has the sum carried away.
// Why:      persistent blocks drift apart, so the memory works on many places at once, and the grid waits for
//           the slowest block. Blocks of one tile are handed out in order; while one waits, seven others on
//           its SM work. Trials of the kernel ran before the predictions.
// Counter:  time and dram_share are those of v04 again, without its load requests.
// Requires: compute capability 9.0. Contiguous tensors of any size; unless all three addresses are multiples
//           of 16 bytes, which the copy engine asks for, every element is added as in v01.
// Twin:     triton-kernels/elementwise/vector_add/v06_bulk_tile.py
#include "args.h"
#include "lib/common.cuh"
#include "lib/ptx/hopper.cuh"

constexpr int THREADS = 256;
constexpr int TILE = THREADS;  // vectors of 16 bytes, one a thread: 4 KiB

// a, b, out: [n]. The copy engine moves the first `vectors` * 16 bytes of each, a tile a block. No
// __restrict__: out may be a or b.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    vector_add_v06_bulk_tile_kernel(const T* a, const T* b, T* out, int64_t n, int64_t vectors) {
#if __CUDA_ARCH__ >= 900
  using Vector = Pack<T>;
  __shared__ alignas(128) Vector a_tile[TILE];  // the sum takes the place of a
  __shared__ alignas(128) Vector b_tile[TILE];
  __shared__ uint64_t arrived;  // its only phase completes when both tiles have arrived

  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t begin = int64_t{blockIdx.x} * TILE;
  const int size = static_cast<int>(max(int64_t{0}, min(int64_t{TILE}, vectors - begin)));
  const uint32_t bytes = size * sizeof(Vector);

  if (size > 0) {
    const uint64_t policy = l2_evict_first_policy();
    if (threadIdx.x == 0) {
      mbarrier_init(&arrived, 1);
      fence_mbarrier_init();
      mbarrier_arrive_expect_tx(&arrived, 2 * bytes);
      bulk_load(a_tile, a + begin * Vector::SIZE, bytes, &arrived, policy);
      bulk_load(b_tile, b + begin * Vector::SIZE, bytes, &arrived, policy);
    }
    __syncthreads();                    // waits for the mbarrier to be initialised
    mbarrier_wait_parity(&arrived, 0);  // waits for the copies of a and b
    if (threadIdx.x < size) {
      Vector* a_vector = &a_tile[threadIdx.x];
      *a_vector = *a_vector + b_tile[threadIdx.x];
      fence_proxy_async();  // the copy engine is about to read what this thread wrote
    }
    __syncthreads();  // waits for every thread's part of the sum
    if (threadIdx.x == 0) {
      bulk_store(out + begin * Vector::SIZE, a_tile, bytes, policy);
      bulk_commit_group();
    }
  }

  // The remainder, one element a thread.
  const int64_t stride = int64_t{gridDim.x} * THREADS;
  for (int64_t i = vectors * Vector::SIZE + int64_t{blockIdx.x} * THREADS + threadIdx.x; i < n; i += stride) {
    out[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
  }
  if (threadIdx.x == 0) bulk_wait_group_read<0>();  // shared memory must outlive the store that reads it
#endif
}

void vector_add_v06_bulk_tile(const VectorAddArgs& args) {
  if (args.n == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t vectors = aligned_to_16_bytes(args.a, args.b, args.out) ? args.n / Pack<T>::SIZE : 0;
    const int64_t grid = cdiv(vectors ? vectors : args.n, THREADS);
    vector_add_v06_bulk_tile_kernel<<<grid, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.a), static_cast<const T*>(args.b), static_cast<T*>(args.out), args.n,
        vectors);
  });
  CUDA_CHECK(cudaGetLastError());
}
