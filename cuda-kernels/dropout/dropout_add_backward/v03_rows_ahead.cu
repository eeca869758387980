// dropout_add_backward v03_rows_ahead: a thread issues the loads of several rows before it uses the first.
//
// Change:   a thread loads four packs of dout from four rows, or two each of dout and x from two rows, and
//           only then draws words, writes dx and adds to its sums, row by row. An SM runs three blocks.
// Why:      v02 has one load of 16 bytes a thread under way, 16 KiB an SM, and waits for it before it issues
//           the next one. An SM's share of the bandwidth is 23 bytes a ns, the latency some 700 ns: their
//           product must be under way, and several times that if answers come late.
// Counter:  long_scoreboard falls; dram_share stays, as an SM holds fewer blocks.
// Requires: rows that are contiguous, at any distance; any length. Accesses have 16 bytes where N and the
//           distances are whole packs and the addresses multiples of 16 bytes; elsewhere they have one
//           element, since the columns of a thread have another skew in every row.
// Gap:      a Triton program has as many loads under way as its block has packs for a thread, and v02's list
//           has blocks of several.
#include "args.h"
#include "columns.cuh"
#include "gradient.cuh"
#include "lib/packs.cuh"
#include "lib/partial_sums.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int BLOCKS_PER_SM = 3;
constexpr int AHEAD = 4;  // loads of 16 bytes under way in a thread

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
    dropout_add_backward_v03_rows_ahead_kernel(const DropoutAddBackwardArgs args, int lanes, int strips,
                                               int64_t chunk_rows, float* partials) {
  constexpr bool WIDE = ACCESS == Access::PACKS;
  constexpr int SIZE = Pack<T>::SIZE, LOADS = ACTIVATION == Activation::none ? 1 : 2,
                ROWS = WIDE ? AHEAD / LOADS : 1;
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
  for (int64_t first = chunk * chunk_rows + group; count > 0 && first < end; first += ROWS * groups) {
    Pack<T> dout[ROWS] = {}, x[ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int64_t row = first + i * groups;
      if (row >= end) continue;
      dout[i] = load<T, ACCESS>(args.dout, args.stride_dm, row, col, count);
      if (ACTIVATION != Activation::none) x[i] = load<T, ACCESS>(args.x, args.stride_xm, row, col, count);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int64_t row = first + i * groups;
      if (row >= end) break;
      const int64_t at = row * args.N + col;
      bool kept[SIZE];
      mask.forget_keys();
      if (WIDE) {
        mask.keeps(kept, at);
      } else {
        keeps_anywhere(mask, kept, at);
      }
      Pack<T> results;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float z = to_float(x[i][j]) + to_float(bias[j]);
        // Computed for all elements, then selected: computed only where kept, each would take a branch.
        const float passed = gradient<ACTIVATION>(to_float(dout[i][j]), z, args.dropout.scale);
        const float dx = kept[j] ? passed : 0.0f;
        sums[j] += dx;
        set(results, j, from_float<T>(dx));
      }
      store_pack(static_cast<T*>(args.dx) + at, 0, count, WIDE, results);
    }
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
    dropout_add_backward_v03_rows_ahead_sum_kernel(const float* partials, int chunks, int64_t N, T* dbias) {
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
  const auto kernel = wide ? dropout_add_backward_v03_rows_ahead_kernel<T, ACTIVATION, Access::PACKS>
                           : dropout_add_backward_v03_rows_ahead_kernel<T, ACTIVATION, Access::ELEMENTS>;
  kernel<<<strips * chunks, THREADS, 0, args.stream>>>(args, lanes, static_cast<int>(strips), chunk_rows,
                                                       partials);
  if (args.dbias == nullptr) return;
  dropout_add_backward_v03_rows_ahead_sum_kernel<T>
      <<<cdiv(args.N, SUM_COLUMNS), SUM_COLUMNS * SUM_GROUPS, 0, args.stream>>>(
          partials, static_cast<int>(chunks), args.N, static_cast<T*>(args.dbias));
}

}  // namespace

void dropout_add_backward_v03_rows_ahead(const DropoutAddBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, args.activation,
           [&]<typename T, Activation ACTIVATION>() { launch<T, ACTIVATION>(args); });
  CUDA_CHECK(cudaGetLastError());
}
