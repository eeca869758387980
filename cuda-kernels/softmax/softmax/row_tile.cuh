// The kernel of softmax's v13 for short rows that are no whole packs. Terms: docs/glossary.md.
#pragma once

#include "lib/row_tile.cuh"
#include "register_row.cuh"

// x: [M, N], rows stride_xm apart; out: [M, N]. A block has `rows` rows, LANES lanes one of them at a time,
// of at most LANES * TILE_ITEMS elements.
template <typename T, Form FORM, int LANES>
__device__ void softmax_of_row_tile(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                    int64_t stride_xm, int rows) {
  constexpr bool LOG = FORM == Form::LOGARITHM;
  extern __shared__ uint4 words[];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * rows;
  const int count = static_cast<int>(min(static_cast<int64_t>(rows), M - first));
  const TileRows<T> tile{x + first * stride_xm, stride_xm, N, count, words, x + (M - 1) * stride_xm + N};
  const TileOut<T> tile_out{out + first * N, N, count, words + tile_words<T>(rows, N, stride_xm)};
  tile.load();
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();  // waits for all threads' copies

  const int lane = threadIdx.x % LANES;
  for (int r = threadIdx.x / LANES; r < rows; r += TILE_THREADS / LANES) {
    // Lanes past the last row take that row again, since the shuffles need all 32 lanes.
    const T* const row = tile[min(r, count - 1)];
    float values[TILE_ITEMS];
    float max = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < TILE_ITEMS; ++i) {
      if (i * LANES >= N) break;
      const int column = i * LANES + lane;
      values[i] = column < N ? to_float(row[column]) : -INFINITY;
      max = fmaxf(max, values[i]);
    }
    max = lanes_max<LANES>(max);
#pragma unroll
    for (int i = 0; i < TILE_ITEMS; ++i) {
      if (i * LANES >= N) break;
      const float power = exp_of<T>(values[i] - origin(max));
      sum += power;
      if (!LOG) values[i] = power;
    }
    sum = lanes_sum<LANES>(sum);
    // A row of nothing but minus infinity has the sum 0, and gets its NaN as 0 / 0 or -inf - -inf.
    const float factor = LOG ? logf(sum) : 1.0f / sum;
    T* const row_out = tile_out[r];
#pragma unroll
    for (int i = 0; i < TILE_ITEMS; ++i) {
      const int column = i * LANES + lane;
      if (i * LANES >= N) break;
      const float result = LOG ? values[i] - max - factor : values[i] * factor;
      if (r < count && column < N) row_out[column] = from_float<T>(result);
    }
  }
  __syncthreads();  // waits for all rows of the tile
  tile_out.store();
}
