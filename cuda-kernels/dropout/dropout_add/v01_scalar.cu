// dropout_add v01_scalar: one thread takes one element, and draws four words for it.
//
// Change:   none yet, this is where the ladder starts.
// Why:      the definition, word for word: an element's number says which Philox block its word is in. The
//           three other words of the block are thrown away, after ten rounds of two wide products each.
// Counter:  instructions limit it, so dram_share is low: memory waits for them.
// Requires: rows that are contiguous, at any distance; any length.
// Source:   Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11)
// Twin:     triton-kernels/dropout/dropout_add/v01_scalar.py
#include "args.h"
#include "dropout/mask.cuh"
#include "lib/activation_by_dtype.cuh"
#include "lib/places.cuh"

namespace {

constexpr int THREADS = 256;

template <typename T, Activation ACTIVATION>
__global__ void __launch_bounds__(THREADS) dropout_add_v01_scalar_kernel(const DropoutAddArgs args) {
  const Mask mask(args.dropout);
  mask.note(args.dropout.used);
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= args.M * args.N) return;
  const Place place = place_of(i, args.N);

  float value = to_float(static_cast<const T*>(args.x)[place.row * args.stride_xm + place.col]);
  if (args.bias) value += to_float(static_cast<const T*>(args.bias)[place.col]);
  value = activate_for<T, ACTIVATION>(value) * args.dropout.scale;
  if (!mask.keeps(i)) value = 0.0f;  // whatever it was, NaN too
  if (args.residual) {
    value += to_float(static_cast<const T*>(args.residual)[place.row * args.stride_rm + place.col]);
  }
  static_cast<T*>(args.out)[i] = from_float<T>(value);
}

}  // namespace

void dropout_add_v01_scalar(const DropoutAddArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, args.activation, [&]<typename T, Activation ACTIVATION>() {
    dropout_add_v01_scalar_kernel<T, ACTIVATION>
        <<<cdiv(args.M * args.N, THREADS), THREADS, 0, args.stream>>>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
