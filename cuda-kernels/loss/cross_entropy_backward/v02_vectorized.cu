// cross_entropy_backward v02_vectorized: a block takes a chunk of a row, in packs of 16 bytes.
//
// Change:   a block takes a chunk of 1024 packs, four a thread, which loads all four before it uses the
//           first, and before it knows the row's target. Packs are counted from a multiple of 16 bytes; the
//           ragged ones at the row's ends are moved element by element.
// Why:      an eighth of the loads and stores, and 64 bytes in flight a thread. A block that ends after one
//           chunk makes room for another, whose loads overlap with its stores.
// Counter:  instructions and time fall; dram_share rises.
// Requires: rows of contiguous elements, of fewer than 2^31 elements, less two chunks. Stores of 16 bytes
//           need out's rows to have the skew of the logits'; out may be the logits.
// Source:   vector_add's v03, applied to rows
// Twin:     none, Triton chooses the width of an access by itself.
#include <limits>

#include "gradient.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int PACKS = 4;
constexpr int CHUNK = THREADS * PACKS;

// logits, out: [M, N], rows stride_lm and stride_om apart; target, lse: [M]; dout: [M], stride_dm apart.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_backward_v02_vectorized_kernel(const CrossEntropyBackwardArgs args, unsigned chunks) {
  const int64_t row = blockIdx.x / chunks;
  const int chunk = static_cast<int>(blockIdx.x % chunks);
  const T* row_logits = static_cast<const T*>(args.logits) + row * args.stride_lm;
  T* row_out = static_cast<T*>(args.out) + row * args.stride_om;
  const int start = (chunk * CHUNK + static_cast<int>(threadIdx.x)) * Pack<T>::SIZE - skew_of(row_logits);
  write_gradient<PACKS>(args, row, row_logits, row_out,
                        [=](int i) { return start + i * THREADS * Pack<T>::SIZE; });
}

}  // namespace

void cross_entropy_backward_v02_vectorized(const CrossEntropyBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool skewed = reinterpret_cast<uintptr_t>(args.logits) % 16 || args.stride_lm % Pack<T>::SIZE;
    const int64_t packs = skewed ? most_packs<T>(args.N) : cdiv(args.N, Pack<T>::SIZE);
    const int64_t chunks = cdiv(packs, CHUNK);
    // Elements are counted in 32 bits to the end of the last chunk, which may hold a single element of the
    // row.
    if (args.N > std::numeric_limits<int>::max() - 2 * CHUNK * Pack<T>::SIZE) {
      throw std::runtime_error("logits has rows of " + std::to_string(args.N) +
                               " elements, v02_vectorized counts to 2^31: take v01_scalar");
    }
    // rows * chunks fits a grid: no memory holds as many rows of more than one chunk.
    launch_rows(args.M, [&](int64_t first, int64_t rows) {
      CrossEntropyBackwardArgs part = args;
      part.logits = static_cast<const T*>(args.logits) + first * args.stride_lm;
      part.target += first;
      part.lse += first;
      const int64_t dout_bytes = args.dout_dtype == Dtype::fp32 ? sizeof(float) : sizeof(T);
      part.dout = static_cast<const char*>(args.dout) + first * args.stride_dm * dout_bytes;
      part.out = static_cast<T*>(args.out) + first * args.stride_om;
      part.M = rows;
      cross_entropy_backward_v02_vectorized_kernel<T>
          <<<static_cast<unsigned>(rows * chunks), THREADS, 0, args.stream>>>(part,
                                                                              static_cast<unsigned>(chunks));
    });
  });
  CUDA_CHECK(cudaGetLastError());
}
