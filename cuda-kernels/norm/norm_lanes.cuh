// Short rows of any skew, several or one a warp: a kernel of layer_norm's v12 and rms_norm's v07, for rows
// whose skew differs between the matrices. Terms: docs/glossary.md.
#pragma once

#include "norm.cuh"
#include "norm_shifted.cuh"

constexpr int SHIFTED_THREADS = 128;
// Blocks that an SM must have room for, which bounds a thread's registers.
template <int PACKS>
constexpr int SHIFTED_BLOCKS = PACKS == 2   ? 8
                               : PACKS == 3 ? 6
                               : PACKS == 4 ? 5
                               : PACKS <= 6 ? 4
                                            : 3;

// LANES lanes of a warp take one row, of at most LANES * PACKS packs, which are laid out for out. A block
// takes SHIFTED_THREADS / LANES rows.
template <typename T, int LANES, int PACKS, bool CENTERED>
__device__ void normalise_shifted(const NormArgs& args) {
  constexpr int ROWS = SHIFTED_THREADS / LANES, SIZE = Pack<T>::SIZE, STEP = LANES * SIZE;
  using Packs = ShiftedPacks<T, Skews::DIFFER, PACKS>;
  const int N = static_cast<int>(args.N), lane = threadIdx.x % LANES;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  // Lanes past the last row stay for the shuffles, with the last row's values.
  const int64_t inside = min(index, args.M - 1);
  const NormRow<T> row(args, inside);
  const RowPart<T> part(N, skew_of(row.out), 0, LANES * PACKS);
  HeldRow<T, PACKS, CENTERED, false> held(N, skew_of(row.out), lane, LANES);
  const Packs x({args.x, inside, args.M, args.N, args.stride_xm, part}, part, lane * SIZE, STEP);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) held.packs[i] = x[i];
  if (args.residual) {  // only now: x and residual at once would take too many registers
    const Packs residual({args.residual, inside, args.M, args.N, args.stride_rm, part}, part, lane * SIZE,
                         STEP);
    const bool aligned = skew_of(row.added) == skew_of(row.out);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      held.packs[i] = held.packs[i] + residual[i];
      store_pack(row.added, held.first_of(i), N, aligned, held.packs[i]);
    }
  }
  const float mean = CENTERED ? lanes_sum<LANES>(held.sum()) / static_cast<float>(N) : 0.0f;
  const float rstd = rstd_of(lanes_sum<LANES>(held.squares(mean)), N, args.eps);
  if (index >= args.M) return;
  if (lane == 0) {
    if (CENTERED) args.mean[index] = mean;
    args.rstd[index] = rstd;
  }
  // One pack after the other: these come from L1, and would take registers while the row travels.
  const auto factors_of = [&](const void* factors, int i) {
    const ReadRow<T> from(factors, args.N, part);
    return ShiftedPacks<T, Skews::DIFFER, 1>(from, part, lane * SIZE + i * STEP, 0)[0];
  };
  held.write(
      row, mean, rstd, [&](int i, int) { return factors_of(args.weight, i); },
      [&](int i, int) { return factors_of(args.bias, i); });
}

// Launches kernel_of(LANES, PACKS), which are integral constants, with the fewest lanes that hold a row, in
// two packs each or, from 32 lanes on, in more. False if a row is too long for a warp.
template <typename T, typename KernelOf>
bool launch_shifted(const NormArgs& args, KernelOf kernel_of) {
  const auto launch = [&](auto lanes, auto packs) {
    const int64_t blocks = cdiv(args.M, SHIFTED_THREADS / lanes);
    if (blocks > INT32_MAX) return false;
    kernel_of(lanes, packs)<<<static_cast<unsigned>(blocks), SHIFTED_THREADS, 0, args.stream>>>(args);
    CUDA_CHECK(cudaGetLastError());
    return true;
  };
  const int64_t packs = most_packs<T>(args.out, args.N, args.N);
  const auto by_lanes = [&]<int... LANES>(std::integer_sequence<int, LANES...>) {
    constexpr std::integral_constant<int, 2> TWO;
    return ((packs <= 2 * LANES && launch(std::integral_constant<int, LANES>{}, TWO)) || ...);
  };
  const auto by_packs = [&]<int... PACKS>(std::integer_sequence<int, PACKS...>) {
    constexpr std::integral_constant<int, 32> WARP;
    return ((packs <= 32 * PACKS && launch(WARP, std::integral_constant<int, PACKS>{})) || ...);
  };
  return by_lanes(std::integer_sequence<int, 1, 2, 4, 8, 16>{}) ||
         by_packs(std::integer_sequence<int, 2, 3, 4, 5, 6, 8>{});
}
