// cross_entropy v03_vectorized: packs of 16 bytes, with several of a thread in flight.
//
// Change:   a thread loads four packs of the row before it uses the first. The four get one maximum, by which
//           the sum so far is rescaled once. A row may be misaligned: the elements before the first whole
//           pack and behind the last one are taken one by one, by the first threads.
// Why:      one load, one comparison of pairs and one rescaling replace eight and more of each. The bytes in
//           flight limit a kernel that reads everything once: here they are 16 KiB a block.
// Counter:  instructions and time fall; dram_share rises.
// Requires: rows of contiguous elements, of fewer than 2^31 - 256 elements.
// Source:   Milakov and Gimelshein, arXiv:1805.02867
// Twin:     none, Triton chooses the width of an access by itself.
#include <limits>

#include "loss.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int PACKS = 4;  // in flight a thread

// logits: [M, N], rows stride_lm apart; target, losses, lse: [M].
template <typename T, Smoothing SMOOTHING>
__global__ void __launch_bounds__(THREADS) cross_entropy_v03_vectorized_kernel(const CrossEntropyArgs args) {
  __shared__ RowSums parts[32];
  loss_of_block_row<T, SMOOTHING, THREADS, PACKS>(args, blockIdx.x, parts);
}

}  // namespace

void cross_entropy_v03_vectorized(const CrossEntropyArgs& args) {
  if (args.M == 0) return;
  // Each thread tests for an element behind the last whole pack, up to THREADS past the row's end, in 32
  // bits.
  if (args.N > std::numeric_limits<int>::max() - THREADS) {
    throw std::runtime_error("logits has rows of " + std::to_string(args.N) +
                             " elements, v03_vectorized counts to 2^31: take v02_online");
  }
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = args.smoothing > 0.0f ? cross_entropy_v03_vectorized_kernel<T, Smoothing::SHARED>
                                              : cross_entropy_v03_vectorized_kernel<T, Smoothing::NONE>;
    launch_rows(args.M, [&](int64_t first, int64_t rows) {
      CrossEntropyArgs part = args;
      part.logits = static_cast<const T*>(args.logits) + first * args.stride_lm;
      part.target += first;
      part.losses += first;
      if (part.lse) part.lse += first;
      part.M = rows;
      kernel<<<static_cast<unsigned>(rows), THREADS, 0, args.stream>>>(part);
    });
  });
  CUDA_CHECK(cudaGetLastError());
}
