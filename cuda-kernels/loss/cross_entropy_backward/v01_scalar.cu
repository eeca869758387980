// cross_entropy_backward v01_scalar: a block walks along its row, one element a thread.
//
// Change:   none yet, this is where the ladder starts.
// Why:      the definition, word for word: the gradient is the probability exp(x - lse), with lse from the
//           forward pass, less 1 at the target. Accesses of 2 bytes a thread keep too few bytes in flight.
// Counter:  dram_bytes are the least possible, but dram_share stays below what the memory can do.
// Requires: rows of contiguous elements, of any length. out must not overlap an input.
// Source:   the derivative of cross entropy
// Twin:     triton-kernels/loss/cross_entropy_backward/v01_scalar.py
#include "gradient.cuh"

namespace {

constexpr int THREADS = 256;

// logits, out: [M, N], rows stride_lm and stride_om apart; target, lse: [M]; dout: [M], stride_dm apart.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_backward_v01_scalar_kernel(const CrossEntropyBackwardArgs args) {
  const int64_t row = blockIdx.x;
  const T* __restrict__ row_logits = static_cast<const T*>(args.logits) + row * args.stride_lm;
  T* __restrict__ row_out = static_cast<T*>(args.out) + row * args.stride_om;
  const int64_t target = args.target[row];
  if (target == args.ignore_index) {
    for (int64_t col = threadIdx.x; col < args.N; col += THREADS) row_out[col] = from_float<T>(0.0f);
    return;
  }

  // A target that is no class makes the whole row NaN, as it makes the loss.
  const float dout = target >= 0 && target < args.N ? dout_of<T>(args, row) : NAN;
  const float lse = args.lse[row], shared = args.smoothing / static_cast<float>(args.N);
  for (int64_t col = threadIdx.x; col < args.N; col += THREADS) {
    const float wanted = col == target ? shared + (1.0f - args.smoothing) : shared;
    row_out[col] = from_float<T>((expf(to_float(row_logits[col]) - lse) - wanted) * dout);
  }
}

}  // namespace

void cross_entropy_backward_v01_scalar(const CrossEntropyBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    cross_entropy_backward_v01_scalar_kernel<T>
        <<<static_cast<unsigned>(args.M), THREADS, 0, args.stream>>>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
