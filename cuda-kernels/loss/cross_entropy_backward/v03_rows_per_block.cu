// cross_entropy_backward v03_rows_per_block: a row gets as many threads as it needs.
//
// Change:   a row of up to 128 packs gets one warp or fewer lanes, so that a block has several rows.
// Why:      a row of 1024 bf16 elements is 128 packs: in a chunk of 1024 packs seven of eight threads have no
//           work, and their block has few bytes in flight.
// Counter:  at a row of 131,072 nothing changes; at a row of 1024 the time falls.
// Requires: rows of contiguous elements, of fewer than 2^31 elements. Stores of 16 bytes need out's rows to
//           have the skew of the logits'; out may be the logits.
// Routes:   up to 128 packs: this kernel
//           longer: v02's kernel
// Source:   one warp a row in PyTorch, aten/src/ATen/native/cuda/PersistentSoftmax.cuh
// Twin:     triton-kernels/loss/cross_entropy_backward/v03_rows_per_block.py
#include "gradient.cuh"

void cross_entropy_backward_v02_vectorized(const CrossEntropyBackwardArgs& args);

namespace {

constexpr int THREADS = 256;

// logits, out: [M, N], rows stride_lm and stride_om apart; target, lse: [M]; dout: [M], stride_dm apart. Each
// group of LANES lanes holds a row, of at most LANES * PACKS packs.
template <typename T, int LANES, int PACKS>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_backward_v03_rows_per_block_kernel(const CrossEntropyBackwardArgs args) {
  constexpr int SIZE = Pack<T>::SIZE, ROWS = THREADS / LANES;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  if (row >= args.M) return;
  const T* row_logits = static_cast<const T*>(args.logits) + row * args.stride_lm;
  T* row_out = static_cast<T*>(args.out) + row * args.stride_om;
  const int start = static_cast<int>(threadIdx.x % LANES) * SIZE - skew_of(row_logits);
  write_gradient<PACKS>(args, row, row_logits, row_out, [=](int i) { return start + i * LANES * SIZE; });
}

}  // namespace

void cross_entropy_backward_v03_rows_per_block(const CrossEntropyBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool skewed = reinterpret_cast<uintptr_t>(args.logits) % 16 || args.stride_lm % Pack<T>::SIZE;
    const int64_t packs = skewed ? most_packs<T>(args.N) : cdiv(args.N, Pack<T>::SIZE);
    const bool launched = choose_lanes(packs, [&](auto lanes, auto each) {
      cross_entropy_backward_v03_rows_per_block_kernel<T, lanes, each>
          <<<static_cast<unsigned>(cdiv(args.M, THREADS / lanes)), THREADS, 0, args.stream>>>(args);
    });
    if (!launched) cross_entropy_backward_v02_vectorized(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
