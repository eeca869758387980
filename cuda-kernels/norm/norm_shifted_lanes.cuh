// Short rows of whole packs of out in lanes of a warp, where rows of the inputs start anywhere: a kernel of
// layer_norm's v12 and rms_norm's v07. Terms: docs/glossary.md.
#pragma once

#include "lib/full_lanes.cuh"
#include "lib/shifted_row.cuh"
#include "norm_lanes.cuh"

// Bytes of the longest row: most packs of a lane, in a warp.
constexpr int MOST_SHIFTED_PACKS = 8;
constexpr int64_t LONGEST_SHIFTED_LANES_ROW = 32 * MOST_SHIFTED_PACKS * 16;
// Blocks that an SM must have room for, which bounds a thread's registers. Each pack under way takes two
// words.
template <int PACKS>
constexpr int SHIFTED_LANES_BLOCKS = PACKS == 2   ? 8
                                     : PACKS == 3 ? 6
                                     : PACKS == 4 ? 5
                                                  : 4;

// LANES lanes of a warp take one row of at most LANES * PACKS packs, as in normalise_by_lanes. out, added,
// weights and biases have the alignment of a PACK, x and the residual start anywhere.
template <typename T, int LANES, int PACKS, Norm NORM, Residual RESIDUAL>
__device__ void normalise_by_shifted_lanes(const NormArgs& args) {
  constexpr int SIZE = Pack<T>::SIZE;
  using ItsRow = ShiftedRow<T, LANES, PACKS>;
  const LanesRow<LANES> which(args);
  const NormRow<T> row(args, which.inside);
  RegisterRow<T, PACKS, NORM, Alignment::PACK> held(args.N, 0, threadIdx.x % LANES, LANES);
  const int64_t rows_behind = args.M - 1 - which.inside;
  const ItsRow x(row.x, args.N, rows_behind * args.stride_xm, 0.0f);
  x.load(held.packs);
  if constexpr (RESIDUAL == Residual::ADDED) {
    const ItsRow residual(row.residual, args.N, rows_behind * args.stride_rm, 0.0f);
    Pack<T> more[PACKS];
    residual.load(more);
    x.finish_load(held.packs);  // after the other loads: they would wait for it
    residual.finish_load(more);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float values[SIZE];
#pragma unroll
      for (int j = 0; j < SIZE; ++j) values[j] = float_of(held.packs[i], j) + float_of(more[i], j);
      round_to(held.packs[i], values);
      const int first = held.first_of(i);
      if (first < held.n) __stwb(reinterpret_cast<uint4*>(row.added + first), held.packs[i].words);
    }
  } else {
    x.finish_load(held.packs);
  }
  finish_by_lanes<LANES>(args, which, row, held);
}

// Launches kernel_of(LANES, PACKS), which are integral constants. False if a row is too long for a warp.
template <typename T, typename KernelOf>
bool launch_by_shifted_lanes(const NormArgs& args, KernelOf kernel_of) {
  constexpr std::integral_constant<int, 32> WARP;
  constexpr std::integral_constant<int, MOST_SHIFTED_PACKS> MOST;
  const auto launch = [&](auto lanes, auto packs) { launch_lanes<lanes>(args, kernel_of(lanes, packs)); };
  if (choose_full_lanes<4>(args.N / Pack<T>::SIZE, launch)) return true;
  if (args.N > WARP * MOST * Pack<T>::SIZE) return false;
  launch_lanes<WARP>(args, kernel_of(WARP, MOST));
  return true;
}
