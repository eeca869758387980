// dropout_add v04_several_packs: a thread takes four packs.
//
// Change:   a thread takes four packs, each a block's width from the one before, and issues the loads of all
//           before it draws a word. A division finds the row and column of the first, an addition those of
//           each other. A misaligned pack of a bias is loaded at once, unless a row ends within it.
// Why:      many of v03's instructions compute what is the same, or nearly, for every pack: the seed, the
//           keys of ten rounds, where the row begins, and whether there is a bias. Issue slots are so busy
//           that memory waits for them.
// Counter:  instructions fall; dram_share stays.
// Requires: as v03: rows that are contiguous, at any distance; any length. Accesses have 16 bytes where rows
//           lie end to end, or have whole packs at whole packs' distances, and addresses are multiples of 16
//           bytes.
// Gap:      a Triton program has several packs a thread where its block is larger than its threads' packs.
#include <utility>

#include "args.h"
#include "dropout/mask.cuh"
#include "lib/activation_by_dtype.cuh"
#include "lib/matrix_packs.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int PACKS = 4;

// From one of a thread's packs to the next one.
struct Stride {
  int64_t rows, cols;
};

template <typename T>
__device__ Pack<T> load_bias(const void* bias, bool wide, int64_t col, int64_t N) {
  if (wide) return {__ldg(pack_at<T>(bias, 0, {0, col}))};
  if (col + Pack<T>::SIZE <= N) return load_ragged(static_cast<const T*>(bias) + col, 0, Pack<T>::SIZE, 0.0f);
  return load_elements<T>(bias, 0, {0, col}, N, Pack<T>::SIZE);
}

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

// A pack by accesses of single elements, where the matrix ends within it or it is misaligned.
template <typename T, Activation ACTIVATION>
__device__ void take_elements(const DropoutAddArgs& args, const Mask& mask, int64_t first) {
  const int64_t left = args.M * args.N - first;
  if (left <= 0) return;
  const int count = static_cast<int>(min(left, int64_t{Pack<T>::SIZE}));
  const Place place = place_of(first, args.N);
  const Pack<T> x = load_elements<T>(args.x, args.stride_xm, place, args.N, count);
  Pack<T> residual = {}, bias = {};
  if (args.residual) residual = load_elements<T>(args.residual, args.stride_rm, place, args.N, count);
  if (args.bias) bias = load_elements<T>(args.bias, 0, place, args.N, count);
  const Pack<T> results = results_of<T, ACTIVATION>(args, mask, first, x, bias, residual);
  store_pack(static_cast<T*>(args.out) + first, 0, count, false, results);
}

// Access::PACKS: packs of x, residual and out are aligned, but for the matrix's last elements. end_to_end:
// the rows of x, and those of residual, lie one behind the other.
template <typename T, Activation ACTIVATION, Access ACCESS>
__global__ void __launch_bounds__(THREADS)
    dropout_add_v04_several_packs_kernel(const DropoutAddArgs args, bool end_to_end, bool wide_bias,
                                         Stride stride) {
  constexpr int SIZE = Pack<T>::SIZE;
  constexpr int STEP = THREADS * SIZE;
  const Mask mask(args.dropout);
  mask.note(args.dropout.used);
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t start = static_cast<int64_t>(blockIdx.x) * (PACKS * STEP);
  const int64_t first = start + threadIdx.x * SIZE;
  if (ACCESS == Access::ELEMENTS || start + PACKS * STEP > args.M * args.N) {
#pragma unroll 1
    for (int i = 0; i < PACKS; ++i) take_elements<T, ACTIVATION>(args, mask, first + i * STEP);
    return;
  }

  Place places[PACKS] = {};
  if (args.bias || !end_to_end) {
    places[0] = place_of(first, args.N);
#pragma unroll
    for (int i = 1; i < PACKS; ++i) places[i] = place_after(places[i - 1], stride.rows, stride.cols, args.N);
  }
  Pack<T> x[PACKS], residual[PACKS] = {}, bias[PACKS] = {};
  const auto load = [&](Pack<T>(&packs)[PACKS], const void* matrix, int64_t stride_m) {
    if (end_to_end) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) packs[i].words = __ldcs(pack_at<T>(matrix, 0, {0, first + i * STEP}));
    } else {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) packs[i].words = __ldcs(pack_at<T>(matrix, stride_m, places[i]));
    }
  };
  load(x, args.x, args.stride_xm);
  if (args.residual) load(residual, args.residual, args.stride_rm);
  if (args.bias) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) bias[i] = load_bias<T>(args.bias, wide_bias, places[i].col, args.N);
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int64_t at = first + i * STEP;
    const Pack<T> results = results_of<T, ACTIVATION>(args, mask, at, x[i], bias[i], residual[i]);
    __stcs(reinterpret_cast<uint4*>(static_cast<T*>(args.out) + at), results.words);
  }
}

template <typename T, Activation ACTIVATION>
void launch(DropoutAddArgs args) {
  constexpr int64_t SIZE = Pack<T>::SIZE, STEP = THREADS * SIZE;
  const bool end_to_end =
      args.M == 1 || (args.stride_xm == args.N && (args.residual == nullptr || args.stride_rm == args.N));
  const bool whole = args.N % SIZE == 0 && args.stride_xm % SIZE == 0 &&
                     (args.residual == nullptr || args.stride_rm % SIZE == 0);
  const bool wide = (end_to_end || whole) && aligned_to_16_bytes(args.x, args.residual, args.out);
  const bool wide_bias = args.N % SIZE == 0 && aligned_to_16_bytes(args.bias);
  const int64_t grid = cdiv(args.M * args.N, PACKS * STEP);
  const auto kernel = wide ? dropout_add_v04_several_packs_kernel<T, ACTIVATION, Access::PACKS>
                           : dropout_add_v04_several_packs_kernel<T, ACTIVATION, Access::ELEMENTS>;
  kernel<<<grid, THREADS, 0, args.stream>>>(args, end_to_end, wide_bias, {STEP / args.N, STEP % args.N});
}

}  // namespace

void dropout_add_v04_several_packs(const DropoutAddArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, args.activation,
           [&]<typename T, Activation ACTIVATION>() { launch<T, ACTIVATION>(args); });
  CUDA_CHECK(cudaGetLastError());
}
