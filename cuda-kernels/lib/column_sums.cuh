// Column sums over all rows of a matrix that is computed on the fly and never stored: the gradients of
// weights and biases, for callers that do not want the gradient of x.
//
// A block takes some rows of a strip of columns, and each thread sums its columns in fp32. A second, small
// launch adds the blocks' sums in a fixed order, so every run gives the same bits.
#pragma once

#include <algorithm>

#include "common.cuh"

constexpr int COLUMN_WARPS = 8;
constexpr int COLUMN_BLOCKS_PER_SM = 4;
constexpr int TOTAL_WARPS = 32;

// COUNT neighbouring elements, loaded by one access.
template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T)) Neighbours {
  T of[COUNT];

  __device__ static Neighbours load(const void* matrix, int64_t at) {
    return *reinterpret_cast<const Neighbours*>(static_cast<const T*>(matrix) + at);
  }
};

// First launch: partial sums of each chunk of rows. A Terms is constructed from args and a thread's first
// column. It has COUNT neighbouring columns and SUMS sums of each, and UNROLL rows in flight; add(sums, row)
// adds a row's terms. partials: [SUMS, chunks, N].
template <typename Terms, typename Args>
__global__ void __launch_bounds__(COLUMN_WARPS * 32)
    column_sums_kernel(const Args args, float* partials, unsigned strips, int64_t chunk_rows) {
  constexpr int COUNT = Terms::COUNT;
  __shared__ float totals[COLUMN_WARPS][32 * COUNT];
  const int lane_id = threadIdx.x % 32;
  const int warp_id = threadIdx.x / 32;
  const int64_t chunk = blockIdx.x / strips;
  const int64_t strip_col = int64_t{blockIdx.x % strips} * 32 * COUNT;
  const int64_t end = min(args.M, (chunk + 1) * chunk_rows);
  float sums[Terms::SUMS][COUNT] = {};
  if (const int64_t col = strip_col + lane_id * COUNT; col < args.N) {
    Terms terms(args, col);
#pragma unroll Terms::UNROLL
    for (int64_t row = chunk * chunk_rows + warp_id; row < end; row += COLUMN_WARPS) terms.add(sums, row);
  }
#pragma unroll
  for (int sum = 0; sum < Terms::SUMS; ++sum) {
    if (sum > 0) __syncthreads();  // waits until the previous totals have been read
#pragma unroll
    for (int i = 0; i < COUNT; ++i) totals[warp_id][lane_id * COUNT + i] = sums[sum][i];
    __syncthreads();  // waits for the sums of all warps
    for (int i = threadIdx.x; i < 32 * COUNT && strip_col + i < args.N; i += COLUMN_WARPS * 32) {
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < COLUMN_WARPS; ++warp) total += totals[warp][i];
      partials[(sum * (gridDim.x / strips) + chunk) * args.N + strip_col + i] = total;
    }
  }
}

// Second launch: out [N] = the sums over the chunks of partials [chunks, N]. A block adds 32 columns.
template <typename T>
__global__ void __launch_bounds__(32 * TOTAL_WARPS)
    column_totals_kernel(const float* partials, int64_t chunks, int64_t N, T* out) {
  __shared__ float sums[TOTAL_WARPS][33];  // padded: no bank conflicts along rows or columns
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int64_t first = int64_t{blockIdx.x} * 32, col = first + lane_id;
  float sum = 0.0f;
  if (col < N) {
#pragma unroll 4
    for (int64_t chunk = warp_id; chunk < chunks; chunk += TOTAL_WARPS) sum += partials[chunk * N + col];
  }
  sums[warp_id][lane_id] = sum;
  __syncthreads();  // waits for the sums of all warps
  const float total = warp_sum(sums[lane_id][warp_id]);
  if (lane_id == 0 && first + warp_id < N) out[first + warp_id] = from_float<T>(total);
}

// Launches both kernels. outs: one [N] for each of the SUMS sums. M and N must not be 0.
template <typename Terms, typename Args, typename... Outs>
void sum_columns(const Args& args, Outs*... outs) {
  static_assert(sizeof...(Outs) == Terms::SUMS);
  const int64_t strips = cdiv(args.N, 32 * Terms::COUNT);
  const int64_t most = cdiv(args.M, COLUMN_WARPS);  // chunks, so that each warp has at least one row
  const int64_t wanted =
      std::max<int64_t>(1, int64_t{multiprocessor_count()} * COLUMN_BLOCKS_PER_SM / strips);
  const int64_t chunk_rows = cdiv(args.M, std::min(most, wanted));
  const int64_t chunks = cdiv(args.M, chunk_rows);
  auto* partials = static_cast<float*>(args.memory->workspace(Terms::SUMS * chunks * args.N * sizeof(float)));
  column_sums_kernel<Terms><<<strips * chunks, COLUMN_WARPS * 32, 0, args.stream>>>(
      args, partials, static_cast<unsigned>(strips), chunk_rows);
  CUDA_CHECK(cudaGetLastError());
  const auto add_up = [&](auto* out) {
    column_totals_kernel<<<cdiv(args.N, 32), 32 * TOTAL_WARPS, 0, args.stream>>>(partials, chunks, args.N,
                                                                                 out);
    CUDA_CHECK(cudaGetLastError());
    partials += chunks * args.N;
  };
  (add_up(outs), ...);
}
