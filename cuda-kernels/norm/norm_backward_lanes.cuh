// Short rows of any skew, several or one a warp: a kernel of layer_norm_backward's v07 and
// rms_norm_backward's v05, for rows whose skew differs between the matrices. Terms: docs/glossary.md.
#pragma once

#include "norm_backward_ahead.cuh"
#include "norm_shifted.cuh"

// Blocks of LANES_THREADS that an SM must have room for, which bounds a thread's registers.
template <int PACKS>
constexpr int SHIFTED_BLOCKS = PACKS == 2   ? 4
                               : PACKS == 3 ? 3
                                            : 2;

// LANES lanes of a warp take one row after the other, of at most LANES * PACKS packs. A lane has the same
// columns in all rows, whatever their skew: packs are counted from the row's first element, shifted together
// as they are loaded, and apart as dx is stored.
template <typename T, int LANES, int PACKS, bool CENTERED>
__device__ void backward_shifted(const NormBackwardArgs& args, float* workspace) {
#if __CUDA_ARCH__ >= 900
  constexpr int ROWS = LANES_THREADS / LANES, SIZE = Pack<T>::SIZE, STEP = LANES * SIZE;
  using Packs = ShiftedPacks<T, Skews::DIFFER, PACKS>;
  __shared__ float dweight[STEP * PACKS], dbias[CENTERED ? STEP * PACKS : 1];
  if (workspace) allow_dependent_launch();
  const int N = static_cast<int>(args.N), group = threadIdx.x / LANES, first = threadIdx.x % LANES * SIZE;
  const RowPart<T> whole(args.N, 0, 0, LANES * PACKS);
  GradientColumns<T, PACKS, CENTERED, false> columns(N, 0, threadIdx.x % LANES, LANES);
  Pack<T> weights[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) weights[i] = load_weights<T>(args.weight, 0, columns.first_of(i), N);
  const auto weight_of = [&](int i) {
    keep_packed(weights[i]);  // or the compiler keeps them converted to fp32
    return weights[i];
  };

  for (int64_t base = int64_t{blockIdx.x} * ROWS; base < args.M; base += int64_t{gridDim.x} * ROWS) {
    const int64_t index = min(base + group, args.M - 1);
    RowPart<T> part = whole;
    if (base + group >= args.M)
      part.end = 0;  // lanes past the last row stay for the shuffles, without elements
    const auto row_of = [&](const void* rows, int64_t stride) {
      return ReadRow<T>(rows, index, args.M, args.N, stride, part);
    };
    const float mean = CENTERED ? args.mean[index] : 0.0f, rstd = args.rstd[index];
    HeldRows<T, PACKS> row;
    {
      const Packs x(row_of(args.x, args.stride_xm), part, first, STEP);
      const Packs dout(row_of(args.dout, args.stride_dm), part, first, STEP);
#pragma unroll
      for (int i = 0; i < PACKS; ++i) row.x[i] = x[i], row.dout[i] = dout[i];
    }
    const GradientSums sums = lanes_sum<LANES>(columns.add(row, mean, rstd, weight_of));
    const GradientSums means = {sums.product / static_cast<float>(N), sums.plain / static_cast<float>(N)};
    T* const dx = static_cast<T*>(args.dx) + index * args.N;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int its_first = first + i * STEP;
      const ShiftedPacks<T, Skews::DIFFER, 1> added(row_of(args.dadded, args.stride_am), part, its_first, 0);
      store_shifted<LANES>(dx, part, its_first,
                           columns.result(row, i, mean, rstd, means, weight_of(i), added[0]));
    }
  }
  if (workspace == nullptr) return;
  leave_sums<ROWS>(columns, group, dweight, dbias, N, workspace);
#endif
}

// Launches kernel_of(LANES, PACKS)(args, workspace), which are integral constants, with the fewest lanes that
// hold a row, in two packs each or, from 32 lanes on, in more; then add_kernel. False if a row is too long.
template <typename T, typename KernelOf>
bool launch_shifted(const NormBackwardArgs& args, bool centered, KernelOf kernel_of,
                    void (*add_kernel)(const float*, int, int64_t, T*, T*)) {
  const auto launch = [&](auto lanes, auto packs) {
    const auto kernel = kernel_of(lanes, packs);
    ClusterLaunch occupancy(reinterpret_cast<const void*>(kernel), 1, LANES_THREADS, 0, args.stream);
    const int64_t rows = LANES_THREADS / lanes;
    const auto blocks = static_cast<int>(std::min<int64_t>(occupancy.resident(), cdiv(args.M, rows)));
    launch_with_early_sums<T>(
        args, blocks, centered,
        [&](float* workspace) {
          kernel<<<blocks, LANES_THREADS, 0, args.stream>>>(args, workspace);
          CUDA_CHECK(cudaGetLastError());
        },
        add_kernel);
    return true;
  };
  const int64_t packs = cdiv(args.N, Pack<T>::SIZE);
  const auto by_lanes = [&]<int... LANES>(std::integer_sequence<int, LANES...>) {
    constexpr std::integral_constant<int, 2> TWO;
    return ((packs <= 2 * LANES && launch(std::integral_constant<int, LANES>{}, TWO)) || ...);
  };
  const auto by_packs = [&]<int... PACKS>(std::integer_sequence<int, PACKS...>) {
    constexpr std::integral_constant<int, 32> WARP;
    return ((packs <= 32 * PACKS && launch(WARP, std::integral_constant<int, PACKS>{})) || ...);
  };
  return by_lanes(std::integer_sequence<int, 1, 2, 4, 8, 16>{}) ||
         by_packs(std::integer_sequence<int, 2, 3, 4>{});
}
