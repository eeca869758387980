// What v10 computes for each query before its main kernel, and after it: of rows of any stride, of sequences
// of any length.
#pragma once

#include "delta.cuh"
#include "lib/head_store.cuh"
#include "lib/head_sums.cuh"
#include "task.cuh"

// A padded row's sequence: how many queries it has, which of them the row is, and how many tokens lie before.
struct PaddedRow {
  int row, Sq, first_q;
};

__device__ inline PaddedRow padded_row(const AnyBackwardProblem& problem, int place, int block_m) {
  if (problem.queries.starts == nullptr) return {place, problem.Sq, 0};
  const int n = problem.queries.sequence_of(place / block_m, block_m);
  const int first_q = problem.queries.starts[n],
            row = place - problem.queries.first_slot(n, block_m) * block_m;
  // Before the first sequence's slots, rows are none of any.
  return {row, row < 0 ? row : problem.queries.starts[n + 1] - first_q, first_q};
}

// As attention_backward_delta_kernel. Sets `sums` of its queries to 0, too, unless it is null; `wanted` tells
// whether anybody needs delta.
template <typename T, bool WIDE>
__global__ void __launch_bounds__(DELTA_THREADS)
    attention_backward_v10_dispatch_delta_kernel(const AttentionBackwardArgs args,
                                                 const __grid_constant__ AnyBackwardProblem problem,
                                                 QueryTerms terms, int block_m, int width, bool wanted,
                                                 float4* sums) {
  constexpr int PIECE = Pack<T>::SIZE;
  const int64_t blocks = cdiv(terms.padded, DELTA_QUERIES);  // of a head
  const int64_t head = blockIdx.x / blocks;                  // of all batches'
  const int64_t batch = head / args.H, in_batch = head % args.H;
  const int first = blockIdx.x % blocks * DELTA_QUERIES;
  const int place = first + threadIdx.x / DELTA_LANES;
  const int lane = threadIdx.x % DELTA_LANES;
  const PaddedRow own = padded_row(problem, place, block_m);
  const bool exists = own.row < own.Sq;
  const int64_t token = int64_t{own.first_q} + own.row;
  const auto row_of = [&](const void* heads, const HeadStrides& stride) {
    return static_cast<const T*>(heads) + batch * stride.batch + in_batch * stride.head + token * stride.row;
  };

  if (sums != nullptr) {  // padded is a multiple of block_m, and that one of DELTA_QUERIES
    float4* const own_sums = sums + (head * terms.padded + first) * width / 4;
    for (int i = threadIdx.x; i < DELTA_QUERIES * width / 4; i += DELTA_THREADS) own_sums[i] = {};
  }
  float sum = 0.0f;
  if (exists && wanted) {
    const T* dout = row_of(args.dout, args.dout_stride);
    const T* result = row_of(args.result, args.result_stride);
#pragma unroll 2
    for (int64_t d = lane * PIECE; d < args.D; d += DELTA_LANES * PIECE) {
      const Values<T> a(piece_at<WIDE>(dout + d)), b(piece_at<WIDE>(result + d));
#pragma unroll
      for (int i = 0; i < PIECE; ++i) sum = fmaf(a.of[i], b.of[i], sum);
    }
  }
#pragma unroll
  for (int distance = DELTA_LANES / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffff, sum, distance);

  if (lane > 0) return;
  const float lse = exists ? args.lse[head * args.Sq + token] : -INFINITY;
  const bool empty = lse == -INFINITY;
  if (!empty && args.dlse) sum -= args.dlse[head * args.Sq + token];
  terms.lse2[head * terms.padded + place] = empty ? INFINITY : lse * LOG2_E;
  terms.delta[head * terms.padded + place] = empty ? 0.0f : sum;
}

// Launches it. Without `sums` none are set to 0.
template <typename T>
void launch_delta(const AttentionBackwardArgs& args, const AnyBackwardProblem& problem,
                  const QueryTerms& terms, int block_m, int width, float4* sums) {
  const bool wide =
      rows_are_aligned(args.dout, args.dout_stride) && rows_are_aligned(args.result, args.result_stride);
  const auto kernel = wide ? attention_backward_v10_dispatch_delta_kernel<T, true>
                           : attention_backward_v10_dispatch_delta_kernel<T, false>;
  const unsigned grid = blocks_of(args.B * args.H, terms.padded, terms.padded / DELTA_QUERIES);
  kernel<<<grid, DELTA_THREADS, 0, args.stream>>>(args, problem, terms, block_m, width,
                                                  args.dq != nullptr || args.dk != nullptr, sums);
  CUDA_CHECK(cudaGetLastError());
}

// dq from its sums: a thread turns 32 bytes of each of two rows into 16.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(ROUNDING_THREADS)
    attention_backward_v10_dispatch_rounding_kernel(const __grid_constant__ AnyBackwardProblem problem,
                                                    int block_m, int64_t heads, const float4* sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int WARPGROUPS = ROUNDING_THREADS / WARPGROUP;
  const int64_t part = int64_t{blockIdx.x} * WARPGROUPS + threadIdx.x / WARPGROUP;  // of all heads
  const int thread = threadIdx.x % WARPGROUP;
  const int panel = part % (WIDTH / 64);
  const int64_t tile = part / (WIDTH / 64);
  const int tiles = problem.padded / TILE_ROWS;
  const int64_t head = tile / tiles;
  const int place = tile % tiles * TILE_ROWS;
  if (head >= heads) return;
  const PaddedRow own = padded_row(problem, place, block_m);
  float found[QUADS * 4];
#pragma unroll
  for (int j = 0; j < QUADS; ++j)
    *reinterpret_cast<float4*>(&found[j * 4]) = sums[(part * QUADS + j) * WARPGROUP + thread];
  const HeadStrides& stride = problem.dq_stride;
  T* rows = static_cast<T*>(problem.dq) + head / problem.heads * stride.batch +
            head % problem.heads * stride.head + own.first_q * stride.row + panel * 64;
  const float scale[2] = {problem.scale, problem.scale};
  store_wide(rows, stride.row, found, scale, own.row + thread / 32 * 16 + thread % 32 / 4, own.Sq,
             problem.D - panel * 64);
#endif
}
