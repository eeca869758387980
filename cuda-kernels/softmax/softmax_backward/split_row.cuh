// The kernels of softmax_backward's v07 for rows that are split over many blocks. Terms: docs/glossary.md.
#pragma once

#include "args.h"
#include "gradient.cuh"
#include "lib/split.cuh"

// A thread's packs of each matrix and tile: what is shifted together takes twice the registers while it
// travels.
template <Skews SKEWS>
constexpr int GRADIENT_SPLIT_PACKS = SKEWS == Skews::ALIKE ? 4 : 2;

// What a block reads of dout and y, and which part of the rows it has. out is not read; its skew lays out the
// packs. Block m * parts + p has part p of row m.
template <typename T, Skews SKEWS>
struct SplitRows {
  static constexpr int PACKS = GRADIENT_SPLIT_PACKS<SKEWS>, TILE = SPLIT_THREADS * PACKS;
  const T *dout, *y;
  int shift_dout, shift_y;
  SplitPart<T> part;

  __device__ SplitRows(const SoftmaxBackwardArgs& args, int64_t block, int parts)
      : dout(static_cast<const T*>(args.dout) + block / parts * args.stride_dm),
        y(static_cast<const T*>(args.y) + block / parts * args.stride_ym),
        shift_dout(SKEWS == Skews::ALIKE ? 0 : shift_of(dout, out_of(args, block, parts))),
        shift_y(SKEWS == Skews::ALIKE ? 0 : shift_of(y, out_of(args, block, parts))),
        part(args.N, skew_of<LINE_BYTES>(out_of(args, block, parts)),
             max(reach_of<T>(shift_dout), reach_of<T>(shift_y)), static_cast<int>(block % parts), parts) {}

  __device__ static T* out_of(const SoftmaxBackwardArgs& args, int64_t block, int parts) {
    return static_cast<T*>(args.out) + block / parts * args.N;
  }
  __device__ void load(Pack<T> (&douts)[PACKS], Pack<T> (&ys)[PACKS], int64_t tile) const {
    load_split<SKEWS>(douts, dout, part, tile, shift_dout, 0.0f);
    load_split<SKEWS>(ys, y, part, tile, shift_y, 0.0f);
  }
};

// Writes the sum of the terms of each part of the rows. sums: [M, parts].
template <typename T, Skews SKEWS>
__device__ void sums_of_parts(const SoftmaxBackwardArgs& args, float* sums, int parts) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, PACKS = GRADIENT_SPLIT_PACKS<SKEWS>;
  __shared__ float warps[32];
  allow_dependent_launch();
  const SplitRows<T, SKEWS> rows(args, blockIdx.x, parts);
  float mine = 0.0f;
  if (const int64_t column = rows.part.single(); column >= 0) {
    mine = term_of(to_float(rows.dout[column]), to_float(rows.y[column]), args.log);
  }
  for (int64_t tile = rows.part.begin; tile < rows.part.end; tile += rows.TILE) {
    Pack<T> douts[PACKS], ys[PACKS];
    rows.load(douts, ys, tile);
    float sum = 0.0f;  // a chain of its own for each tile, so that terms of one size are added
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) sum += term_of(to_float(douts[i][j]), to_float(ys[i][j]), args.log);
    }
    mine += sum;
  }
  const float whole = block_sum(mine, warps);
  if (threadIdx.x == 0) sums[blockIdx.x] = whole;
#endif
}

// Adds the sums of a row's parts, and writes one part of the gradient. Blocks come in reverse order, and so
// do tiles: what was read last is still in L2.
template <typename T, typename Gradient, Skews SKEWS>
__device__ void gradient_of_split_rows(const SoftmaxBackwardArgs& args, const float* sums, int parts) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, PACKS = GRADIENT_SPLIT_PACKS<SKEWS>;
  __shared__ float warps[32];
  const int64_t block = gridDim.x - 1 - blockIdx.x;
  const int thread = threadIdx.x;
  const SplitRows<T, SKEWS> rows(args, block, parts);
  T* const out = rows.out_of(args, block, parts);
  wait_for_previous_kernel();  // for the sums of all parts
  const Gradient gradient{block_sum(thread < parts ? sums[block / parts * parts + thread] : 0.0f, warps)};

  if (const int64_t column = rows.part.single(); column >= 0) {
    out[column] = from_float<T>(gradient(to_float(rows.dout[column]), to_float(rows.y[column])));
  }
  const int64_t begin = rows.part.begin, end = rows.part.end;
  for (int64_t tile = begin + (cdiv(end - begin, rows.TILE) - 1) * rows.TILE; tile >= begin;
       tile -= rows.TILE) {
    Pack<T> douts[PACKS], ys[PACKS];
    rows.load(douts, ys, tile);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float values[SIZE];
#pragma unroll
      for (int j = 0; j < SIZE; ++j) values[j] = gradient(to_float(douts[i][j]), to_float(ys[i][j]));
      Pack<T> results;
      round_to(results, values);
      const int64_t pack = tile + i * SPLIT_THREADS + thread;
      if (pack < end) __stwb(reinterpret_cast<uint4*>(out + rows.part.column_of(pack)), results.words);
    }
  }
#endif
}
