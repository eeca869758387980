// attention v01_one_query: a thread computes one query, without the matrix of scores.
//
// Change:   none yet, this is where the ladder starts. A block takes 128 queries of a head and stages keys
//           and values in shared memory. A thread keeps its query's maximum, sum and weighted values.
// Why:      Sq x Sk scores would be written and read several times. The online softmax needs none of them
//           twice: when the maximum grows, what was summed so far is multiplied by one factor. But every
//           product is an FMA of its own, and the tensor cores stay idle.
// Counter:  tensor_pipe is 0; DRAM's traffic grows with Sq + Sk, not with their product.
// Requires: head dimensions that are multiples of 8 up to 128; rows of any strides whose elements are
//           neighbours. Fetched by the element.
// Source:   Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.
// Twin:     triton-kernels/attention/attention/v01_one_query.py
#include "args.h"
#include "lib/common.cuh"
#include "lib/head_limits.h"

namespace {

constexpr int THREADS = 128;  // one a query
constexpr int BLOCK_N = 16;   // keys of a tile
constexpr int CHUNK = 8;      // keys of one step of the online softmax
constexpr int PIECE = 8;      // elements in 16 bytes

static_assert(BLOCK_N % CHUNK == 0, "chunks divide a tile");

// Copies this thread's part of a tile [BLOCK_N, HEAD] to fp32. Rows from rows_left on and columns from D on
// become zero: a weight of 0 would make NaN of a NaN there.
template <int HEAD, typename T>
__device__ inline void copy_tile(float* tile, const T* rows, int64_t stride, int64_t rows_left, int D) {
  for (int i = threadIdx.x; i < BLOCK_N * HEAD; i += THREADS) {
    const int row = i / HEAD;
    const int col = i % HEAD;
    tile[i] = row < rows_left && col < D ? to_float(rows[row * stride + col]) : 0.0f;
  }
}

}  // namespace

// HEAD: 64 or 128, at least D.
template <typename T, int HEAD>
__global__ void __launch_bounds__(THREADS) attention_v01_one_query_kernel(AttentionArgs args) {
  __shared__ Pack<T> q_tile[HEAD / PIECE][THREADS];  // [.., thread]: registers are for the sums
  __shared__ alignas(16) float k_tile[BLOCK_N * HEAD];
  __shared__ alignas(16) float v_tile[BLOCK_N * HEAD];

  // The grid is flat, since its y and z would end at 65535. A head's blocks are neighbours: those that run at
  // the same time read the same keys and values, which come from L2.
  const int64_t blocks_m = cdiv(args.Sq, THREADS);
  const int64_t batch = blockIdx.x / blocks_m / args.H;
  const int64_t head = blockIdx.x / blocks_m % args.H;
  const int64_t kv_head = head / (args.H / args.H_KV);
  const int64_t query = blockIdx.x % blocks_m * THREADS + threadIdx.x;
  const bool valid = query < args.Sq;
  const int D = args.D;
  const T* q = static_cast<const T*>(args.q) + batch * args.q_stride.batch + head * args.q_stride.head +
               query * args.q_stride.row;
  const T* k = static_cast<const T*>(args.k) + batch * args.k_stride.batch + kv_head * args.k_stride.head;
  const T* v = static_cast<const T*>(args.v) + batch * args.v_stride.batch + kv_head * args.v_stride.head;

  // The query sees the keys from first_key to end_key - 1. Written so that no limit can overflow.
  const int64_t first_key = min(max(args.band.first, -query), args.Sk) + query;
  const int64_t end_key = min(args.band.last, args.Sk - 1 - query) + query + 1;

  // A thread reads what it wrote itself, so that no barrier is needed.
#pragma unroll 1
  for (int i = 0; i < HEAD / PIECE; ++i) {
    alignas(16) T elements[PIECE];
#pragma unroll
    for (int j = 0; j < PIECE; ++j)
      elements[j] = valid && i * PIECE < D ? q[i * PIECE + j] : from_float<T>(0.0f);
    q_tile[i][threadIdx.x] = *reinterpret_cast<const Pack<T>*>(elements);
  }

  float row_max = -INFINITY;
  float row_sum = 0.0f;
  float sums[HEAD] = {};  // of weighted values
  for (int64_t tile = 0; tile < args.Sk; tile += BLOCK_N) {
    copy_tile<HEAD>(k_tile, k + tile * args.k_stride.row, args.k_stride.row, args.Sk - tile, D);
    copy_tile<HEAD>(v_tile, v + tile * args.v_stride.row, args.v_stride.row, args.Sk - tile, D);
    __syncthreads();  // for both tiles to be complete
#pragma unroll 1
    for (int chunk = 0; chunk < BLOCK_N; chunk += CHUNK) {
      // All lanes read the same address, which shared memory answers once.
      float weights[CHUNK] = {};  // scores at first
#pragma unroll 2
      for (int i = 0; i < HEAD / PIECE; ++i) {
        const Pack<T> piece = q_tile[i][threadIdx.x];
#pragma unroll
        for (int n = 0; n < CHUNK; ++n) {
          alignas(16) float keys[PIECE];
          const float4* from = reinterpret_cast<const float4*>(&k_tile[(chunk + n) * HEAD + i * PIECE]);
          reinterpret_cast<float4*>(keys)[0] = from[0];
          reinterpret_cast<float4*>(keys)[1] = from[1];
#pragma unroll
          for (int j = 0; j < PIECE; ++j) weights[n] += to_float(piece[j]) * keys[j];
        }
      }

      float new_max = row_max;
#pragma unroll
      for (int n = 0; n < CHUNK; ++n) {
        const int64_t key = tile + chunk + n;
        weights[n] = key >= first_key && key < end_key ? weights[n] * args.scale : -INFINITY;
        new_max = fmaxf(new_max, weights[n]);
      }
      // Before the first key that the query sees, -inf - -inf would be NaN.
      const float origin = new_max == -INFINITY ? 0.0f : new_max;
      const float factor = __expf(row_max - origin);
      row_max = new_max;
      row_sum *= factor;
#pragma unroll
      for (int n = 0; n < CHUNK; ++n) {
        weights[n] = __expf(weights[n] - origin);
        row_sum += weights[n];
        weights[n] = to_float(from_float<T>(weights[n]));  // as later steps give them to the tensor cores
      }
#pragma unroll
      for (int d = 0; d < HEAD; ++d) {
        sums[d] *= factor;
#pragma unroll
        for (int n = 0; n < CHUNK; ++n) sums[d] += weights[n] * v_tile[(chunk + n) * HEAD + d];
      }
    }
    __syncthreads();  // for all reads, before the next tiles take the place of these
  }

  if (!valid) return;
  const int64_t row = (batch * args.H + head) * args.Sq + query;
  const bool empty = row_sum == 0.0f;  // the query sees no key
  T* out = static_cast<T*>(args.out) + row * args.D;
#pragma unroll
  for (int d = 0; d < HEAD; ++d) {
    if (d < D) out[d] = from_float<T>(empty ? 0.0f : sums[d] / row_sum);
  }
  args.lse[row] = empty ? -INFINITY : row_max + logf(row_sum);
}

void attention_v01_one_query(const AttentionArgs& args) {
  if (args.B * args.H * args.Sq == 0) return;
  require_narrow_heads(args.D, 128, "v14_dispatch");
  const unsigned grid = blocks_of(args.B * args.H, args.Sq, cdiv(args.Sq, THREADS));
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (sizeof(T) == 2) {
      const auto kernel =
          args.D <= 64 ? attention_v01_one_query_kernel<T, 64> : attention_v01_one_query_kernel<T, 128>;
      kernel<<<grid, THREADS, 0, args.stream>>>(args);
      CUDA_CHECK(cudaGetLastError());
    }
  });
}
