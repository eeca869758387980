// dropout_add_backward v01_rows_then_columns: one launch for dx, one along the columns for dbias.
//
// Change:   for dx, a thread takes an element. For dbias, a thread takes a column over a slice of the rows; a
//           third launch adds the slices, always in the same order.
// Why:      the definition, word for word: a column sums dx before it is rounded. Both launches draw the
//           words of the forward pass again, one element at a time.
// Counter:  everything is read twice, so without an activation dram_bytes are 1.5 times the least possible.
// Requires: rows that are contiguous, at any distance; any length.
// Source:   the derivative of dropout_add
// Twin:     triton-kernels/dropout/dropout_add_backward/v01_rows_then_columns.py
#include "args.h"
#include "dropout/mask.cuh"
#include "gradient.cuh"
#include "lib/partial_sums.cuh"
#include "lib/places.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int COLUMNS = 256;      // of a block that sums columns, one column a thread
constexpr int MOST_SLICES = 128;  // of the rows

// dx before it is rounded.
template <typename T, Activation ACTIVATION>
__device__ float dx_of(const DropoutAddBackwardArgs& args, const Mask& mask, Place place) {
  float z = 0.0f;
  if (ACTIVATION != Activation::none) {
    z = to_float(static_cast<const T*>(args.x)[place.row * args.stride_xm + place.col]);
    if (args.bias) z += to_float(static_cast<const T*>(args.bias)[place.col]);
  }
  const float dout = to_float(static_cast<const T*>(args.dout)[place.row * args.stride_dm + place.col]);
  const float dx = gradient<ACTIVATION>(dout, z, args.dropout.scale);
  return mask.keeps(place.row * args.N + place.col) ? dx : 0.0f;
}

template <typename T, Activation ACTIVATION>
__global__ void __launch_bounds__(THREADS)
    dropout_add_backward_v01_rows_then_columns_kernel(const DropoutAddBackwardArgs args) {
  const Mask mask(args.dropout);
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= args.M * args.N) return;
  static_cast<T*>(args.dx)[i] = from_float<T>(dx_of<T, ACTIVATION>(args, mask, place_of(i, args.N)));
}

// The column sums of a slice of the rows; a thread takes a column. partials: [slices, N].
template <typename T, Activation ACTIVATION>
__global__ void __launch_bounds__(COLUMNS)
    dropout_add_backward_v01_rows_then_columns_columns_kernel(const DropoutAddBackwardArgs args,
                                                              float* partials) {
  const Mask mask(args.dropout);
  const int64_t col = static_cast<int64_t>(blockIdx.x) * COLUMNS + threadIdx.x;
  if (col >= args.N) return;
  float sum = 0.0f;
  for (int64_t row = blockIdx.y; row < args.M; row += gridDim.y) {
    sum += dx_of<T, ACTIVATION>(args, mask, {row, col});
  }
  partials[blockIdx.y * args.N + col] = sum;
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    dropout_add_backward_v01_rows_then_columns_sum_kernel(const float* partials, int slices, int64_t N,
                                                          T* dbias) {
  add_partial_sums(partials, slices, N, dbias, static_cast<T*>(nullptr));
}

template <typename T, Activation ACTIVATION>
void launch(const DropoutAddBackwardArgs& args) {
  if (args.M > 0) {
    dropout_add_backward_v01_rows_then_columns_kernel<T, ACTIVATION>
        <<<cdiv(args.M * args.N, THREADS), THREADS, 0, args.stream>>>(args);
  }
  if (args.dbias == nullptr) return;
  const int slices = static_cast<int>(std::clamp<int64_t>(args.M, 1, MOST_SLICES));
  auto* partials = static_cast<float*>(args.memory->workspace(slices * args.N * sizeof(float)));
  const dim3 grid(static_cast<unsigned>(cdiv(args.N, COLUMNS)), slices);
  dropout_add_backward_v01_rows_then_columns_columns_kernel<T, ACTIVATION>
      <<<grid, COLUMNS, 0, args.stream>>>(args, partials);
  dropout_add_backward_v01_rows_then_columns_sum_kernel<T>
      <<<cdiv(args.N, SUM_COLUMNS), SUM_COLUMNS * SUM_GROUPS, 0, args.stream>>>(partials, slices, args.N,
                                                                                static_cast<T*>(args.dbias));
}

}  // namespace

void dropout_add_backward_v01_rows_then_columns(const DropoutAddBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, args.activation,
           [&]<typename T, Activation ACTIVATION>() { launch<T, ACTIVATION>(args); });
  CUDA_CHECK(cudaGetLastError());
}
