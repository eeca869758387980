// dropout_add v02_four_words: a thread takes the four elements whose words one Philox call draws.
//
// Change:   a thread has four neighbours, which begin at a multiple of 4 and may lie in two rows or more.
// Why:      a quarter of the random numbers' work, and a quarter of the divisions that find a row.
// Counter:  instructions fall.
// Requires: rows that are contiguous, at any distance; any length.
// Twin:     triton-kernels/dropout/dropout_add/v02_four_words.py
#include "args.h"
#include "dropout/mask.cuh"
#include "lib/activation_by_dtype.cuh"
#include "lib/places.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WORDS = 4;

template <typename T, Activation ACTIVATION>
__global__ void __launch_bounds__(THREADS) dropout_add_v02_four_words_kernel(const DropoutAddArgs args) {
  const Mask mask(args.dropout);
  mask.note(args.dropout.used);
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * WORDS;
  const int64_t left = args.M * args.N - first;
  if (left <= 0) return;

  // All loads come before the first store: for all the compiler knows, a store might change what they read.
  float x[WORDS], bias[WORDS], residual[WORDS];
  Place place = place_of(first, args.N);
#pragma unroll
  for (int j = 0; j < WORDS; ++j, place = next(place, args.N)) {
    x[j] = bias[j] = residual[j] = 0.0f;
    if (j >= left) continue;
    x[j] = to_float(static_cast<const T*>(args.x)[place.row * args.stride_xm + place.col]);
    if (args.bias) bias[j] = to_float(static_cast<const T*>(args.bias)[place.col]);
    if (args.residual) {
      residual[j] = to_float(static_cast<const T*>(args.residual)[place.row * args.stride_rm + place.col]);
    }
  }

  bool kept[WORDS];
  mask.keeps(kept, first);
#pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const float value = activate_for<T, ACTIVATION>(x[j] + bias[j]) * args.dropout.scale;
    if (j < left) {
      static_cast<T*>(args.out)[first + j] = from_float<T>((kept[j] ? value : 0.0f) + residual[j]);
    }
  }
}

}  // namespace

void dropout_add_v02_four_words(const DropoutAddArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, args.activation, [&]<typename T, Activation ACTIVATION>() {
    dropout_add_v02_four_words_kernel<T, ACTIVATION>
        <<<cdiv(args.M * args.N, THREADS * WORDS), THREADS, 0, args.stream>>>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
