// Short rows of whole packs, several or one a warp: a kernel of the norms' dispatching backward steps. Terms:
// docs/glossary.md.
#pragma once

#include <utility>

#include "lib/cluster.cuh"
#include "norm_backward_ahead_columns.cuh"
#include "norm_backward_early.cuh"

constexpr int BACKWARD_LANES_THREADS = 128;  // of a block
// Packs a lane that a warp's rows may take without weights, whose column sums take no registers then.
constexpr int MOST_LANE_PACKS = 8;
// With weights: more column sums, two a column with dbias, would spill.
template <Norm NORM>
constexpr int SUMMED_LANE_PACKS = NORM == Norm::LAYER ? 5 : 6;

// LANES lanes take one row after the other, which are whole packs in all matrices. They issue the loads of
// the next row before they work on one.
template <typename T, int LANES, int PACKS, Norm NORM, Affine AFFINE>
__device__ void backward_by_lanes(const NormBackwardArgs& args, float* workspace) {
#if __CUDA_ARCH__ >= 900
  constexpr bool CENTERED = NORM == Norm::LAYER;
  constexpr int SIZE = Pack<T>::SIZE, ROWS = BACKWARD_LANES_THREADS / LANES;
  constexpr int COLUMNS = AFFINE == Affine::GIVEN ? LANES * PACKS * SIZE : 1;
  __shared__ float dweight[COLUMNS], dbias[CENTERED ? COLUMNS : 1];
  if (workspace) allow_dependent_launch();
  const int N = static_cast<int>(args.N), group = threadIdx.x / LANES;
  const int64_t step = static_cast<int64_t>(gridDim.x) * ROWS;
  int64_t index = static_cast<int64_t>(blockIdx.x) * ROWS + group;
  GradientColumns<T, PACKS, NORM, Alignment::PACK> columns(N, 0, static_cast<int>(threadIdx.x) % LANES,
                                                           LANES);
  const auto first_of = [&](int i) { return columns.first_of(i); };
  Pack<T> weights[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) weights[i] = load_weights<T>(args.weight, 0, first_of(i), N);
  const auto weight_of = [&](int i) {
    if constexpr (AFFINE == Affine::GIVEN) return weights[i];
    if constexpr (AFFINE == Affine::NONE) return NoWeights{};
  };

  HeldOperands<T, PACKS> row, next;
  float next_mean = 0.0f, next_rstd = 0.0f;
  // Groups past the last row stay for the shuffles, with rows of zeros.
  const auto load = [&](HeldOperands<T, PACKS>& rows, int64_t at) {
    const int64_t inside = min(at, args.M - 1);
    const auto load_row = [&](Pack<T>(&packs)[PACKS], const void* matrix, int64_t stride) {
      load_touching_packs(packs, static_cast<const T*>(matrix) + inside * stride, at < args.M ? N : 0,
                          first_of);
    };
    load_row(rows.x, args.x, args.stride_xm);
    load_row(rows.dout, args.dout, args.stride_dm);
    if (CENTERED) next_mean = args.mean[inside];
    next_rstd = args.rstd[inside];
  };
  load(next, index);
  for (int64_t base = index - group; base < args.M; base += step, index += step) {
    const float mean = next_mean, rstd = next_rstd;
    row = next;
    load(next, index + step);
    const GradientSums sums = lanes_sum<LANES>(columns.add(row, mean, rstd, weight_of));
    if (index >= args.M) continue;
    const T* const added_row =
        args.dadded ? static_cast<const T*>(args.dadded) + index * args.stride_am : nullptr;
    columns.write(row, static_cast<T*>(args.dx) + index * N, mean, rstd,
                  {sums.product / static_cast<float>(N), sums.plain / static_cast<float>(N)}, weight_of,
                  [&](int, int first) {
                    // Loaded as late as this: before, its registers would cost a block of an SM.
                    return load_added<Alignment::PACK>(added_row, first, N);
                  });
  }

  if constexpr (AFFINE == Affine::GIVEN) {
    if (workspace == nullptr) return;
    // Groups of lanes have sums of all columns; they add them to the block's, one group after the other.
    for (int turn = 0; turn < ROWS; ++turn) {
      if (turn == group) {
        columns.for_each([&](int col, float of_weight, float of_bias) {
          dweight[col] = turn > 0 ? dweight[col] + of_weight : of_weight;
          if (CENTERED) dbias[col] = turn > 0 ? dbias[col] + of_bias : of_bias;
        });
      }
      __syncthreads();  // for that group's sums
    }
    for (int col = threadIdx.x; col < N; col += blockDim.x) {
      partial_sums(workspace, 0, gridDim.x, N, blockIdx.x)[col] = dweight[col];
      if (CENTERED) partial_sums(workspace, 1, gridDim.x, N, blockIdx.x)[col] = dbias[col];
    }
  }
#endif
}

// Launches kernel_of(LANES, PACKS)(args, workspace), which are integral constants, with the fewest lanes that
// hold a row's packs in two each or, of a warp, in up to MOST_PACKS; then add_kernel. False if a row is too
// long.
template <typename T, int MOST_PACKS, typename KernelOf>
bool launch_lanes(const NormBackwardArgs& args, bool centered, KernelOf kernel_of,
                  void (*add_kernel)(const float*, int, int64_t, T*, T*)) {
  const int64_t packs = args.N / Pack<T>::SIZE;
  const auto launch = [&](auto lanes, auto of_lane) {
    const auto kernel = kernel_of(lanes, of_lane);
    ClusterLaunch occupancy(reinterpret_cast<const void*>(kernel), 1, BACKWARD_LANES_THREADS, 0, args.stream);
    const int blocks = static_cast<int>(
        std::min<int64_t>(cdiv(args.M, BACKWARD_LANES_THREADS / lanes), occupancy.resident()));
    launch_with_early_sums<T>(
        args, blocks, centered,
        [&](float* workspace) {
          kernel<<<blocks, BACKWARD_LANES_THREADS, 0, args.stream>>>(args, workspace);
          CUDA_CHECK(cudaGetLastError());
        },
        add_kernel);
    return true;
  };
  const auto by_lanes = [&]<int... LANES>(std::integer_sequence<int, LANES...>) {
    constexpr std::integral_constant<int, 2> TWO;
    return ((packs <= 2 * LANES && launch(std::integral_constant<int, LANES>{}, TWO)) || ...);
  };
  const auto by_packs = [&]<int... PACKS>(std::integer_sequence<int, PACKS...>) {
    constexpr std::integral_constant<int, 32> WARP;
    const auto fits = [&](auto of_lane) {
      if constexpr (of_lane <= MOST_PACKS) return packs <= 32 * of_lane && launch(WARP, of_lane);
      return false;
    };
    return (fits(std::integral_constant<int, PACKS>{}) || ...);
  };
  return by_lanes(std::integer_sequence<int, 1, 2, 4, 8, 16, 32>{}) ||
         by_packs(std::integer_sequence<int, 3, 4, 5, 6, MOST_LANE_PACKS>{});
}
