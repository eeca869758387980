// The kernels of softmax's v13 for rows that are split over many blocks. Terms: docs/glossary.md.
#pragma once

#include "args.h"
#include "lib/split.cuh"
#include "register_row.cuh"

// A thread's packs of each tile: what is shifted together takes twice the registers while it travels.
template <Skews SKEWS>
constexpr int SPLIT_PACKS = SKEWS == Skews::ALIKE ? 8 : 4;

// Writes the maximum and sum of each part of x's rows. x, out: [M, N], rows of x stride_xm apart; numbers:
// [M, parts]. Block m * parts + p has part p of row m. out is not written; its skew lays out the packs.
template <typename T, Skews SKEWS>
__device__ void softmax_of_parts(const T* __restrict__ x, const T* out, MaxSum* numbers, int64_t N,
                                 int64_t stride_xm, int parts) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, PACKS = SPLIT_PACKS<SKEWS>;
  __shared__ MaxSum warps[32];
  allow_dependent_launch();
  const int64_t row = blockIdx.x / parts;
  const T* const row_x = x + row * stride_xm;
  const T* const row_out = out + row * N;
  const int shift = SKEWS == Skews::ALIKE ? 0 : shift_of(row_x, row_out);
  const SplitPart<T> part(N, skew_of<LINE_BYTES>(row_out), reach_of<T>(shift),
                          static_cast<int>(blockIdx.x % parts), parts);
  MaxSum mine;  // the thread's own, over all of its tiles
  if (const int64_t column = part.single(); column >= 0) mine = {to_float(row_x[column]), 1.0f};
  if (mine.max == -INFINITY) mine.sum = 0.0f;

  for (int64_t tile = part.begin; tile < part.end; tile += SPLIT_THREADS * PACKS) {
    Pack<T> packs[PACKS];
    load_split<SKEWS>(packs, row_x, part, tile, shift, -INFINITY);
    float max = mine.max;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) max = fmaxf(max, max_of(packs[i]));
    float sum = rescaled(mine, max);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float pack_sum = 0.0f;  // a separate sum a pack: shorter chains of dependent additions
      keep_packed(packs[i]);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) pack_sum += exp_of(float_of(packs[i], j) - origin(max));
      sum += pack_sum;
    }
    mine = {max, sum};
  }
  const MaxSum whole = block_merge(mine, warps);
  if (threadIdx.x == 0) numbers[blockIdx.x] = whole;
#endif
}

// Merges the numbers of a row's parts, and writes one part of the result. Blocks come in reverse order, and
// so do tiles: what was read last is still in L2.
template <typename T, Form FORM, Skews SKEWS>
__device__ void softmax_of_split_rows(const T* __restrict__ x, T* __restrict__ out, const MaxSum* numbers,
                                      int64_t N, int64_t stride_xm, int parts) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, PACKS = SPLIT_PACKS<SKEWS>, TILE = SPLIT_THREADS * PACKS;
  __shared__ MaxSum warps[32];
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const int64_t row = block / parts;
  const T* const row_x = x + row * stride_xm;
  T* const row_out = out + row * N;
  const int shift = SKEWS == Skews::ALIKE ? 0 : shift_of<T>(row_x, row_out);
  const SplitPart<T> part(N, skew_of<LINE_BYTES>(row_out), reach_of<T>(shift),
                          static_cast<int>(block % parts), parts);
  const int thread = threadIdx.x;
  wait_for_previous_kernel();  // for the numbers of all parts
  const MaxSum whole = block_merge(thread < parts ? numbers[row * parts + thread] : MaxSum{}, warps);
  const ResultOf<T, FORM> result(whole);

  if (const int64_t column = part.single(); column >= 0) {
    row_out[column] = from_float<T>(result(to_float(row_x[column])));
  }
  const int64_t tiles = cdiv(part.end - part.begin, TILE);
  for (int64_t tile = part.begin + (tiles - 1) * TILE; tile >= part.begin; tile -= TILE) {
    Pack<T> packs[PACKS];
    load_split<SKEWS>(packs, row_x, part, tile, shift, 0.0f);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float values[SIZE];
#pragma unroll
      for (int j = 0; j < SIZE; ++j) values[j] = result(to_float(packs[i][j]));
      Pack<T> results;
      round_to(results, values);
      const int64_t pack = tile + i * SPLIT_THREADS + thread;
      if (pack < part.end) __stwb(reinterpret_cast<uint4*>(row_out + part.column_of(pack)), results.words);
    }
  }
#endif
}
