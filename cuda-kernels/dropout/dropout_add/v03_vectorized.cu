// dropout_add v03_vectorized: accesses of 16 bytes.
//
// Change:   a thread takes a pack, eight bf16 elements or four of fp32, with as many Philox calls as it
//           needs. Loads and stores are marked as streaming (evict first). Without a bias, rows that lie end
//           to end are one long row, in which no element's column has to be found.
// Why:      an eighth of the requests. All of a thread's loads are under way before its first word is drawn,
//           and drawing words hides their latency.
// Counter:  sectors_per_load rises to 16, that of full packs; dram_share rises, while issue slots stay busy.
// Requires: rows that are contiguous, at any distance; any length. Packs are counted through the whole
//           matrix.
//           - rows end to end, at addresses that are multiples of 16 bytes: 16 bytes an access, whatever the
//             rows' length
//           - rows of whole packs at whole packs' distances, at such addresses: 16 bytes an access
//           - others: one element an access
// Gap:      Triton chooses the width of an access by itself; its v02 has 16 bytes where addresses allow it.
#include <utility>

#include "args.h"
#include "dropout/mask.cuh"
#include "lib/activation_by_dtype.cuh"
#include "lib/matrix_packs.cuh"

namespace {

constexpr int THREADS = 256;

// The results for a pack that begins at element `first`, a multiple of 4.
template <typename T, Activation ACTIVATION>
__device__ Pack<T> results_of(const DropoutAddArgs& args, const Mask& mask, int64_t first, Pack<T> x,
                              Pack<T> bias, Pack<T> residual) {
  constexpr int SIZE = Pack<T>::SIZE;
  float values[SIZE];
  bool kept[SIZE];
  mask.keeps(kept, first);
#pragma unroll
  for (int j = 0; j < SIZE; ++j) values[j] = to_float(x[j]);
  if (args.bias) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] += to_float(bias[j]);
  }
#pragma unroll
  for (int j = 0; j < SIZE; ++j) {
    // Computed for all elements, then selected: computed only where kept, each would take a branch.
    const float result = activate_for<T, ACTIVATION>(values[j]) * args.dropout.scale;
    values[j] = kept[j] ? result : 0.0f;
  }
  if (args.residual) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] += to_float(residual[j]);
  }
  Pack<T> results;
#pragma unroll
  for (int j = 0; j < SIZE; ++j) set(results, j, from_float<T>(values[j]));
  return results;
}

// Access::PACKS: packs of x, residual and out are aligned, but for the matrix's last elements.
template <typename T, Activation ACTIVATION, Access ACCESS>
__global__ void __launch_bounds__(THREADS)
    dropout_add_v03_vectorized_kernel(const DropoutAddArgs args, bool wide_bias) {
  constexpr int SIZE = Pack<T>::SIZE;
  constexpr bool WIDE = ACCESS == Access::PACKS;
  const Mask mask(args.dropout);
  mask.note(args.dropout.used);
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * SIZE;
  const int64_t left = args.M * args.N - first;
  if (left <= 0) return;
  const Place place = place_of(first, args.N);
  const int count = left < SIZE ? static_cast<int>(left) : SIZE;

  Pack<T> x, residual = {}, bias = {};
  if (WIDE && count == SIZE) {
    x.words = __ldcs(pack_at<T>(args.x, args.stride_xm, place));
    if (args.residual) residual.words = __ldcs(pack_at<T>(args.residual, args.stride_rm, place));
  } else {
    x = load_elements<T>(args.x, args.stride_xm, place, args.N, count);
    if (args.residual) residual = load_elements<T>(args.residual, args.stride_rm, place, args.N, count);
  }
  if (args.bias && wide_bias && count == SIZE) {
    bias.words = __ldg(pack_at<T>(args.bias, 0, place));
  } else if (args.bias) {
    bias = load_elements<T>(args.bias, 0, place, args.N, count);
  }
  const Pack<T> results = results_of<T, ACTIVATION>(args, mask, first, x, bias, residual);
  store_pack(static_cast<T*>(args.out) + first, 0, count, WIDE, results);
}

template <typename T, Activation ACTIVATION>
void launch(DropoutAddArgs args) {
  constexpr int64_t SIZE = Pack<T>::SIZE;
  const bool end_to_end =
      args.M == 1 || (args.stride_xm == args.N && (args.residual == nullptr || args.stride_rm == args.N));
  const bool whole = args.N % SIZE == 0 && args.stride_xm % SIZE == 0 &&
                     (args.residual == nullptr || args.stride_rm % SIZE == 0);
  const bool wide = (end_to_end || whole) && aligned_to_16_bytes(args.x, args.residual, args.out);
  const bool wide_bias = args.N % SIZE == 0 && aligned_to_16_bytes(args.bias);
  const int64_t grid = cdiv(args.M * args.N, THREADS * SIZE);
  if (end_to_end && args.bias == nullptr) args.N = std::exchange(args.M, 1) * args.N;
  const auto kernel = wide ? dropout_add_v03_vectorized_kernel<T, ACTIVATION, Access::PACKS>
                           : dropout_add_v03_vectorized_kernel<T, ACTIVATION, Access::ELEMENTS>;
  kernel<<<grid, THREADS, 0, args.stream>>>(args, wide_bias);
}

}  // namespace

void dropout_add_v03_vectorized(const DropoutAddArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, args.activation,
           [&]<typename T, Activation ACTIVATION>() { launch<T, ACTIVATION>(args); });
  CUDA_CHECK(cudaGetLastError());
}
