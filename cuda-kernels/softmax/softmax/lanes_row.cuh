// The kernel of softmax's v13 for short rows of whole packs: several rows a warp. Terms: docs/glossary.md.
#pragma once

#include "lib/load_if.cuh"
#include "lib/shifted_row.cuh"
#include "register_row.cuh"

constexpr int LANES_THREADS = 256;
constexpr int64_t LANES_ROW = 8 * 3 * 16;  // bytes: the longest row, three packs in each of eight lanes

// x: [M, N], rows stride_xm apart; out: [M, N]. Rows consist of whole packs. Those of out start at a multiple
// of 16 bytes, and so do those of x, unless SKEWS DIFFER. LANES lanes hold a row, PACKS packs each.
template <typename T, Form FORM, int LANES, int PACKS, Skews SKEWS>
__device__ void softmax_of_lanes_row(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                     int64_t stride_xm) {
  constexpr int SIZE = Pack<T>::SIZE, STEP = LANES * SIZE, ROWS = LANES_THREADS / LANES;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  // Lanes past the last row take that row again, since the shuffles need all 32 lanes.
  const int64_t inside = min(row, M - 1);
  const T* const row_x = x + inside * stride_xm;
  const int first = static_cast<int>(threadIdx.x % LANES) * SIZE;
  Pack<T> held[PACKS];
  if constexpr (SKEWS == Skews::DIFFER) {
    const ShiftedRow<T, LANES, PACKS> shifted(row_x, N, (M - 1 - inside) * stride_xm, -INFINITY);
    shifted.load(held);
    shifted.finish_load(held);
  } else {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) set(held[i], j, from_float<T>(-INFINITY));
      load_if<Reading::USUAL>(first + i * STEP < N, row_x + first + i * STEP, held[i].words);
    }
  }

  const ResultOf<T, FORM> result(lanes_merge<LANES>(max_sum_of(held, -INFINITY)));
  if (row >= M) return;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    keep_packed(held[i]);
    const Pack<T> results = results_of(held[i], result);
    T* const place = out + row * N + first + i * STEP;
    if (first + i * STEP < N) __stwb(reinterpret_cast<uint4*>(place), results.words);
  }
}

// Calls launch(LANES, PACKS, blocks), two integral constants first: with the fewest places for packs, since a
// lane without a pack takes instructions all the same. The grid is never too large: each block writes 2 KiB
// or more.
template <typename T, typename Launch>
void launch_lanes_rows(const SoftmaxArgs& args, Launch launch) {
  const int64_t packs = args.N / Pack<T>::SIZE;
  const auto with = [&]<int LANES, int PACKS>(std::integer_sequence<int, LANES, PACKS>) {
    if (packs > LANES * PACKS) return false;
    launch(std::integral_constant<int, LANES>{}, std::integral_constant<int, PACKS>{},
           cdiv(args.M, LANES_THREADS / LANES));
    return true;
  };
  const auto with_first = [&](auto... shapes) { (void)(with(shapes) || ...); };
  with_first(std::integer_sequence<int, 1, 1>{}, std::integer_sequence<int, 2, 1>{},
             std::integer_sequence<int, 4, 1>{}, std::integer_sequence<int, 8, 1>{},
             std::integer_sequence<int, 4, 3>{}, std::integer_sequence<int, 16, 1>{},
             std::integer_sequence<int, 8, 3>{});
}
