// The kernel of softmax's v13 for short rows of whole packs: several rows a warp. Terms: docs/glossary.md.
#pragma once

#include "register_row.cuh"

constexpr int LANES_THREADS = 256;
constexpr int MOST_LANES = 16;
constexpr int64_t LANES_ROW = 16 * MOST_LANES;  // bytes: the longest row

// x: [M, N], rows stride_xm apart; out: [M, N]. All rows start at a multiple of 16 bytes and consist of whole
// packs. LANES lanes hold a row, a pack each.
template <typename T, Form FORM, int LANES>
__device__ void softmax_of_lanes_row(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                     int64_t stride_xm) {
  constexpr int SIZE = Pack<T>::SIZE, ROWS = LANES_THREADS / LANES;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  const int first = static_cast<int>(threadIdx.x % LANES) * SIZE;
  // Lanes without a pack take part in the shuffles, which need all 32 lanes.
  const bool holds = row < M && first < N;
  Pack<T> held[1];
#pragma unroll
  for (int j = 0; j < SIZE; ++j) set(held[0], j, from_float<T>(-INFINITY));
  if (holds) held[0].words = *reinterpret_cast<const uint4*>(x + row * stride_xm + first);

  const ResultOf<T, FORM> result(lanes_merge<LANES>(max_sum_of(held, -INFINITY)));
  const Pack<T> results = results_of(held[0], result);
  if (holds) __stwb(reinterpret_cast<uint4*>(out + row * N + first), results.words);
}

// Calls launch(LANES, blocks) with the fewest lanes, as an integral constant. The grid is never too large:
// each block writes 2 KiB or more.
template <typename T, typename Launch>
void launch_lanes_rows(const SoftmaxArgs& args, Launch launch) {
  const int64_t packs = args.N / Pack<T>::SIZE;
  const auto with = [&](auto lanes) {
    if (packs > lanes) return false;
    launch(lanes, cdiv(args.M, LANES_THREADS / lanes));
    return true;
  };
  (void)(with(std::integral_constant<int, 1>{}) || with(std::integral_constant<int, 2>{}) ||
         with(std::integral_constant<int, 4>{}) || with(std::integral_constant<int, 8>{}) ||
         with(std::integral_constant<int, MOST_LANES>{}));
}
