// What every step of attention_backward computes first: two numbers of each query.
#pragma once

#include "args.h"
#include "lib/activation.cuh"
#include "lib/head_limits.h"
#include "lib/head_rows.cuh"

// In fp32 [B, H, padded]. p = exp2(scale * log2(e) * q @ k - lse2), ds = p * (dout @ v - delta). For queries
// that see no key, and behind the last query, lse2 is +inf and delta 0, so that p and ds are 0.
struct QueryTerms {
  float* lse2;   // lse * log2(e)
  float* delta;  // sum(dout * result) - dlse
  int64_t padded;
};

constexpr int DELTA_THREADS = 256;
constexpr int DELTA_LANES = 8;  // that share a query
constexpr int DELTA_QUERIES = DELTA_THREADS / DELTA_LANES;

// WIDE: rows of dout and result are aligned to 16 bytes.
template <typename T, bool WIDE>
__global__ void __launch_bounds__(DELTA_THREADS)
    attention_backward_delta_kernel(const AttentionBackwardArgs args, QueryTerms terms) {
  constexpr int PIECE = Pack<T>::SIZE;
  const int64_t blocks = cdiv(terms.padded, DELTA_QUERIES);  // of a head
  const int64_t head = blockIdx.x / blocks;                  // of all batches'
  const int64_t batch = head / args.H, in_batch = head % args.H;
  const int64_t query = blockIdx.x % blocks * DELTA_QUERIES + threadIdx.x / DELTA_LANES;
  const int lane = threadIdx.x % DELTA_LANES;
  const auto row_of = [&](const void* heads, const HeadStrides& stride) {
    return static_cast<const T*>(heads) + batch * stride.batch + in_batch * stride.head + query * stride.row;
  };

  float sum = 0.0f;
  if (query < args.Sq) {
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

  if (lane > 0 || query >= terms.padded) return;
  const float lse = query < args.Sq ? args.lse[head * args.Sq + query] : -INFINITY;
  const bool empty = lse == -INFINITY;
  if (!empty && args.dlse) sum -= args.dlse[head * args.Sq + query];
  terms.lse2[head * terms.padded + query] = empty ? INFINITY : lse * LOG2_E;
  terms.delta[head * terms.padded + query] = empty ? 0.0f : sum;
}

// Launches attention_backward_delta_kernel; T is the operands' type. `padded`: at least Sq. B, H and padded
// must not be 0.
template <typename T>
QueryTerms query_terms(const AttentionBackwardArgs& args, int64_t padded) {
  const int64_t numbers = args.B * args.H * padded;
  auto* const lse2 = static_cast<float*>(args.memory->workspace(2 * numbers * sizeof(float)));
  const QueryTerms terms = {.lse2 = lse2, .delta = lse2 + numbers, .padded = padded};
  const bool wide =
      rows_are_aligned(args.dout, args.dout_stride) && rows_are_aligned(args.result, args.result_stride);
  const auto kernel =
      wide ? attention_backward_delta_kernel<T, true> : attention_backward_delta_kernel<T, false>;
  const unsigned grid = blocks_of(args.B * args.H, padded, cdiv(padded, DELTA_QUERIES));
  kernel<<<grid, DELTA_THREADS, 0, args.stream>>>(args, terms);
  CUDA_CHECK(cudaGetLastError());
  return terms;
}
