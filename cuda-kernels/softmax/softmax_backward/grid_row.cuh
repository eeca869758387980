// The kernel of softmax_backward's v07 for rows held by the whole GPU. Terms: docs/glossary.md.
#pragma once

#include "args.h"
#include "gradient.cuh"
#include "lib/grid_row.cuh"

struct TermSum {
  float sum = 0.0f;
};

// Holds dout and y. Packs are laid out on the lines of out.
template <typename T, typename Gradient>
struct GridSoftmaxGradient {
  static constexpr int SIZE = Pack<T>::SIZE, PACKS = CHUNK_PACKS<2> / GRID_WORKERS;
  static constexpr bool LOG = !std::is_same_v<Gradient, SoftmaxGradient>;
  static constexpr float FILL = 0.0f;
  using Numbers = TermSum;

  T* out;
  int N;
  Gradient gradient{};

  __device__ int skew_of_row(int64_t row) const { return skew_of<LINE_BYTES>(out + row * N); }
  __device__ static TermSum merge(TermSum a, TermSum b) { return {a.sum + b.sum}; }

  __device__ void add(TermSum& mine, const GridPart&, const Pack<T> (&packs)[2][PACKS], int) const {
    float sum = 0.0f;  // a chain of its own for each chunk, so that terms of one size are added
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) sum += term_of(float_of(packs[0][i], j), float_of(packs[1][i], j), LOG);
    }
    mine.sum += sum;
  }

  __device__ void begin_row(const GridPart&, TermSum whole) { gradient = {whole.sum}; }

  __device__ void write(const GridPart& part, const Pack<T> (&packs)[2][PACKS], int at, int) const {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float values[SIZE];
#pragma unroll
      for (int j = 0; j < SIZE; ++j) values[j] = gradient(float_of(packs[0][i], j), float_of(packs[1][i], j));
      Pack<T> results;
      round_to(results, values);
      store_pack(out + part.row * N, at + i * GRID_WORKERS * SIZE, part.end, true, results);
    }
  }
};
