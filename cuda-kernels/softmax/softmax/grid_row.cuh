// The kernel of softmax's v13 for rows held by the whole GPU. Terms: docs/glossary.md.
#pragma once

#include "args.h"
#include "lib/grid_row.cuh"
#include "register_row.cuh"

template <typename T, Form FORM>
struct GridSoftmax {
  static constexpr int SIZE = Pack<T>::SIZE, PACKS = CHUNK_PACKS<1> / GRID_WORKERS;
  static constexpr float FILL = -INFINITY;
  using Numbers = MaxSum;

  T* out;
  int N;
  ResultOf<T, FORM> result{MaxSum{}};

  __device__ int skew_of_row(int64_t row) const { return skew_of<LINE_BYTES>(out + row * N); }

  __device__ static MaxSum merge(MaxSum a, MaxSum b) {
    const float max = fmaxf(a.max, b.max);
    return {max, rescaled(a, max) + rescaled(b, max)};
  }

  __device__ void add(MaxSum& mine, const GridPart&, Pack<T> (&packs)[1][PACKS], int) const {
    float max = mine.max;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) max = fmaxf(max, max_of(packs[0][i]));
    float sum = rescaled(mine, max);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float pack_sum = 0.0f;  // a separate sum a pack: shorter chains of dependent additions
#pragma unroll
      for (int j = 0; j < SIZE; ++j) pack_sum += exp_of(float_of(packs[0][i], j) - origin(max));
      sum += pack_sum;
    }
    mine = {max, sum};
  }

  __device__ void begin_row(const GridPart&, MaxSum whole) { result = ResultOf<T, FORM>(whole); }

  __device__ void write(const GridPart& part, const Pack<T> (&packs)[1][PACKS], int at, int) const {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float values[SIZE];
#pragma unroll
      for (int j = 0; j < SIZE; ++j) values[j] = result(float_of(packs[0][i], j));
      Pack<T> results;
      round_to(results, values);
      store_pack(out + part.row * N, at + i * GRID_WORKERS * SIZE, part.end, true, results);
    }
  }
};
