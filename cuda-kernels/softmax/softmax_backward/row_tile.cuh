// The kernel of softmax_backward's v07 for short rows that are no whole packs. Terms: docs/glossary.md.
#pragma once

#include "args.h"
#include "gradient.cuh"
#include "lib/row_tile.cuh"

// A block has `rows` rows, LANES lanes one of them at a time, of at most LANES * TILE_ITEMS elements.
template <typename T, typename Gradient, int LANES>
__device__ void gradient_of_row_tile(const SoftmaxBackwardArgs& args, int rows) {
  extern __shared__ uint4 words[];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * rows;
  const int N = static_cast<int>(args.N);
  const int count = static_cast<int>(min(static_cast<int64_t>(rows), args.M - first));
  const auto rows_of = [&](const void* matrix, int64_t stride, uint4* to) {
    const T* const begin = static_cast<const T*>(matrix);
    return TileRows<T>{begin + first * stride, stride, N, count, to, begin + (args.M - 1) * stride + N};
  };
  const TileRows<T> douts = rows_of(args.dout, args.stride_dm, words);
  const TileRows<T> ys = rows_of(args.y, args.stride_ym, words + tile_words<T>(rows, N, args.stride_dm));
  const TileOut<T> outs{static_cast<T*>(args.out) + first * N, N, count,
                        ys.words + tile_words<T>(rows, N, args.stride_ym)};
  douts.load();
  ys.load();
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();  // waits for all threads' copies

  const int lane = threadIdx.x % LANES;
  for (int r = threadIdx.x / LANES; r < rows; r += TILE_THREADS / LANES) {
    // Lanes past the last row take that row again, since the shuffles need all 32 lanes.
    const T *const dout = douts[min(r, count - 1)], *const y = ys[min(r, count - 1)];
    float dout_of[TILE_ITEMS], y_of[TILE_ITEMS], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TILE_ITEMS; ++i) {
      if (i * LANES >= N) break;
      const int column = i * LANES + lane;
      dout_of[i] = column < N ? to_float(dout[column]) : 0.0f;
      y_of[i] = column < N ? to_float(y[column]) : 0.0f;
      sum += term_of(dout_of[i], y_of[i], args.log);
    }
    const Gradient gradient{lanes_sum<LANES>(sum)};
    T* const out = outs[r];
#pragma unroll
    for (int i = 0; i < TILE_ITEMS; ++i) {
      if (i * LANES >= N) break;
      const int column = i * LANES + lane;
      if (r < count && column < N) out[column] = from_float<T>(gradient(dout_of[i], y_of[i]));
    }
  }
  __syncthreads();  // waits for all rows of the tile
  outs.store();
}
