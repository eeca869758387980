// cross_entropy_backward v02_vectorized: a chunk of a row for every block, in packs of 16 bytes.
//
// Change:   a block takes a chunk of 1024 packs, a thread four of them, which it asks for before it looks at
//           the first, and before it knows the row's target. Packs are those of memory: the row's first and
//           last one may be its in part, and are then moved element by element.
// Why:      an eighth of the loads and stores, and 64 bytes of every thread on their way at once. A block
//           that ends after a chunk makes room for another, whose loads fill in while it stores.
// Counter:  instructions and time fall to 0.87 of v01's; dram_share is 88 %.
// Requires: rows that are contiguous, of fewer than 2^31 elements, less two chunks. out's rows take wide
//           stores where they are skewed like the logits'; it may be the logits themselves.
// Source:   vector_add's v03, for rows
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
    // Elements are counted to the end of the last chunk, in which there may be but one of the row's.
    if (args.N > std::numeric_limits<int>::max() - 2 * CHUNK * Pack<T>::SIZE) {
      throw std::runtime_error("logits has rows of " + std::to_string(args.N) +
                               " elements, v02_vectorized counts to 2^31: take v01_scalar");
    }
    // Of rows with more than one chunk, no memory holds as many as a grid has blocks.
    launch_rows(args.M, [&](int64_t first, int64_t rows) {
      CrossEntropyBackwardArgs part = args;
      part.logits = static_cast<const T*>(args.logits) + first * args.stride_lm;
      part.target += first;
      part.lse += first;
      part.dout += first * args.stride_dm;
      part.out = static_cast<T*>(args.out) + first * args.stride_om;
      part.M = rows;
      cross_entropy_backward_v02_vectorized_kernel<T>
          <<<static_cast<unsigned>(rows * chunks), THREADS, 0, args.stream>>>(part,
                                                                              static_cast<unsigned>(chunks));
    });
  });
  CUDA_CHECK(cudaGetLastError());
}
