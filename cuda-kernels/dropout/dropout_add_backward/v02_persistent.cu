// dropout_add_backward v02_persistent: a persistent kernel sums strips of columns in registers.
//
// Change:   a thread keeps the columns of one pack and takes one row after the other: it writes dx, and sums
//           dx, before it is rounded, for its columns. A block has as many threads side by side as a row
//           needs; if that is fewer than all, it takes several rows at once. A second launch adds the blocks'
//           sums, always in the same order.
// Why:      sums of columns that stay with a thread cost an addition an element, without memory or atomics,
//           and everything is read once. Four neighbours share a Philox call.
// Counter:  bytes_over_minimum falls to 1; dram_share rises.
// Requires: rows that are contiguous, at any distance; any length. Accesses have 16 bytes where N and the
//           distances are whole packs and the addresses multiples of 16 bytes; elsewhere they have one
//           element, since the columns of a thread have another skew in every row.
// Twin:     triton-kernels/dropout/dropout_add_backward/v02_persistent.py
#include "args.h"
#include "columns.cuh"
#include "gradient.cuh"
#include "lib/packs.cuh"
#include "lib/partial_sums.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int BLOCKS_PER_SM = 4;

template <typename T, Access ACCESS>
__device__ Pack<T> load(const void* matrix, int64_t stride, int64_t row, int64_t col, int count) {
  const T* from = static_cast<const T*>(matrix) + row * stride + col;
  if (ACCESS == Access::PACKS) return {__ldcs(reinterpret_cast<const uint4*>(from))};
  return load_ragged(from, 0, count, 0.0f);
}

// A row has `strips` strips of `lanes` threads side by side; a chunk is `chunk_rows` rows of a strip.
// partials: [chunks, N], or null if dbias is not wanted. Which access: see Requires.
template <typename T, Activation ACTIVATION, Access ACCESS>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    dropout_add_backward_v02_persistent_kernel(const DropoutAddBackwardArgs args, int lanes, int strips,
                                               int64_t chunk_rows, float* partials) {
  constexpr int SIZE = Pack<T>::SIZE;
  constexpr bool WIDE = ACCESS == Access::PACKS;
  __shared__ float totals[THREADS * SIZE];
  Mask mask(args.dropout);
  const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = THREADS / lanes;
  const int64_t chunk = blockIdx.x / strips, strip_col = int64_t{blockIdx.x % strips} * lanes * SIZE;
  const int64_t col = strip_col + lane * SIZE;
  const int count = static_cast<int>(min(max(args.N - col, int64_t{0}), int64_t{SIZE}));
  const int64_t end = min(args.M, (chunk + 1) * chunk_rows);

  Pack<T> bias = {};
  if (args.bias) bias = load_ragged(static_cast<const T*>(args.bias) + col, 0, count, 0.0f);
  float sums[SIZE] = {};
  for (int64_t row = chunk * chunk_rows + group; count > 0 && row < end; row += groups) {
    const Pack<T> dout = load<T, ACCESS>(args.dout, args.stride_dm, row, col, count);
    Pack<T> x = {};
    if (ACTIVATION != Activation::none) x = load<T, ACCESS>(args.x, args.stride_xm, row, col, count);
    const int64_t i = row * args.N + col;
    mask.forget_keys();
    bool kept[SIZE];
    if (WIDE) {
      mask.keeps(kept, i);
    } else {
      keeps_anywhere(mask, kept, i);
    }
    Pack<T> results;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      const float z = to_float(x[j]) + to_float(bias[j]);
      const float dx = kept[j] ? gradient<ACTIVATION>(to_float(dout[j]), z, args.dropout.scale) : 0.0f;
      sums[j] += dx;
      set(results, j, from_float<T>(dx));
    }
    store_pack(static_cast<T*>(args.dx) + i, 0, count, WIDE, results);
  }
  if (partials == nullptr) return;

#pragma unroll
  for (int j = 0; j < SIZE; ++j) totals[threadIdx.x * SIZE + j] = sums[j];
  __syncthreads();  // for the sums of all groups
  for (int i = threadIdx.x; i < lanes * SIZE && strip_col + i < args.N; i += THREADS) {
    float total = 0.0f;
    for (int other = 0; other < groups; ++other) total += totals[other * lanes * SIZE + i];
    partials[chunk * args.N + strip_col + i] = total;
  }
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    dropout_add_backward_v02_persistent_sum_kernel(const float* partials, int chunks, int64_t N, T* dbias) {
  add_partial_sums(partials, chunks, N, dbias, static_cast<T*>(nullptr));
}

// Threads side by side: as many as a row needs, or so many that few are idle in the last strip.
int lanes_for(int64_t packs) {
  int lanes = THREADS;
  while (lanes > 1 && lanes / 2 >= packs) lanes /= 2;
  while (lanes > 32 && cdiv(packs, lanes) * lanes * 8 > packs * 9) lanes /= 2;
  return lanes;
}

template <typename T, Activation ACTIVATION>
void launch(const DropoutAddBackwardArgs& args) {
  constexpr int64_t SIZE = Pack<T>::SIZE;
  const bool wide = args.N % SIZE == 0 && args.stride_dm % SIZE == 0 &&
                    (args.x == nullptr || args.stride_xm % SIZE == 0) &&
                    aligned_to_16_bytes(args.dout, args.x, args.dx);
  const int lanes = lanes_for(cdiv(args.N, SIZE));
  const int64_t strips = cdiv(args.N, lanes * SIZE);
  const int64_t most = std::max<int64_t>(1, cdiv(args.M, THREADS / lanes));  // each group has a row at least
  const int64_t wanted = std::max<int64_t>(1, int64_t{multiprocessor_count()} * BLOCKS_PER_SM / strips);
  const int64_t chunk_rows = std::max<int64_t>(1, cdiv(args.M, std::min(most, wanted)));
  const int64_t chunks = std::max<int64_t>(1, cdiv(args.M, chunk_rows));
  float* partials = nullptr;
  if (args.dbias) {
    partials = static_cast<float*>(args.memory->workspace(chunks * args.N * sizeof(float)));
  }
  const auto kernel = wide ? dropout_add_backward_v02_persistent_kernel<T, ACTIVATION, Access::PACKS>
                           : dropout_add_backward_v02_persistent_kernel<T, ACTIVATION, Access::ELEMENTS>;
  kernel<<<strips * chunks, THREADS, 0, args.stream>>>(args, lanes, static_cast<int>(strips), chunk_rows,
                                                       partials);
  if (args.dbias == nullptr) return;
  dropout_add_backward_v02_persistent_sum_kernel<T>
      <<<cdiv(args.N, SUM_COLUMNS), SUM_COLUMNS * SUM_GROUPS, 0, args.stream>>>(
          partials, static_cast<int>(chunks), args.N, static_cast<T*>(args.dbias));
}

}  // namespace

void dropout_add_backward_v02_persistent(const DropoutAddBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, args.activation,
           [&]<typename T, Activation ACTIVATION>() { launch<T, ACTIVATION>(args); });
  CUDA_CHECK(cudaGetLastError());
}
