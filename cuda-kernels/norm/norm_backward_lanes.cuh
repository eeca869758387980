// Short rows, several or one a warp: kernels of the norms' dispatching backward steps. Terms:
// docs/glossary.md.
#pragma once

#include <utility>

#include "lib/held.cuh"
#include "norm_backward_ahead_columns.cuh"
#include "norm_backward_early.cuh"

constexpr int LANES_THREADS = 128;  // of a block
// Packs a lane that a warp's rows may take without weights, whose column sums take no registers then.
constexpr int MOST_LANE_PACKS = 8;
// With weights: more column sums, two a column with dbias, would spill.
template <bool CENTERED>
constexpr int SUMMED_LANE_PACKS = CENTERED ? 5 : 6;

// Blocks that an SM must have room for where rows are SHIFTED, which bounds a thread's registers.
constexpr int SHIFTED_BLOCKS = 4, SHIFTED_PACKS = 2;

// The packs of one of LANES lanes that share rows of N elements, and how its row lies in a matrix.
template <typename T, int LANES, int PACKS>
struct LaneRows {
  static constexpr int SIZE = Pack<T>::SIZE;
  const NormBackwardArgs& args;
  int lane, N;

  __device__ int first_of(int i, int skew) const { return (i * LANES + lane) * SIZE - skew; }
  // Up to where a row's words of 16 bytes are read: to the row's end, or to its last whole word.
  __device__ int readable(int64_t index, int64_t stride, int skew) const {
    return is_at_end<T>(args.M, index, stride) ? N - (skew + N) % SIZE : N;
  }
  // Issues the loads of a row's words of 16 bytes; finish_load waits for them.
  __device__ void load(Pack<T> (&packs)[PACKS], const void* matrix, int64_t index, int64_t stride,
                       bool wanted) const {
    const T* const row = static_cast<const T*>(matrix) + index * stride;
    const int skew = skew_of(row), n = wanted ? readable(index, stride, skew) : 0;
    load_touching_packs(packs, row, n, [&](int i) { return first_of(i, skew); });
  }
  __device__ void finish_load(Pack<T> (&packs)[PACKS], const void* matrix, int64_t index, int64_t stride,
                              bool wanted) const {
    if (!wanted || !is_at_end<T>(args.M, index, stride)) return;
    const T* const row = static_cast<const T*>(matrix) + index * stride;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int first = first_of(i, skew_of(row));
      if (first < N && first + SIZE > N) packs[i] = load_ragged(row, first, N, 0.0f);
    }
  }
};

// Leaves a block's sums over its rows in the workspace. ROWS groups of lanes have sums of all N columns; they
// add them to the block's, in shared memory, one group after the other.
template <int ROWS, typename T, int PACKS, bool CENTERED, bool WHOLE>
__device__ void leave_sums(const GradientColumns<T, PACKS, CENTERED, WHOLE>& columns, int group,
                           float* dweight, float* dbias, int N, float* workspace) {
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

// LANES lanes take one row after the other, of the same skew in all matrices. They issue the loads of the
// next row before they work on one. All rows of a lane have the same skew, so that its columns stay the same.
template <typename T, int LANES, int PACKS, bool CENTERED, bool WHOLE, Affine AFFINE>
__device__ void backward_by_lanes(const NormBackwardArgs& args, float* workspace) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, ROWS = LANES_THREADS / LANES;
  constexpr int COLUMNS = AFFINE == Affine::GIVEN ? LANES * PACKS * SIZE : 1;
  __shared__ float dweight[COLUMNS], dbias[CENTERED ? COLUMNS : 1];
  if (workspace) allow_dependent_launch();
  const int N = static_cast<int>(args.N), group = threadIdx.x / LANES;
  const int64_t step = static_cast<int64_t>(gridDim.x) * ROWS;
  const T* x = static_cast<const T*>(args.x);
  int64_t index = static_cast<int64_t>(blockIdx.x) * ROWS + group;
  const int64_t known = min(index, args.M - 1);
  const LaneRows<T, LANES, PACKS> lanes{args, static_cast<int>(threadIdx.x) % LANES, N};
  GradientColumns<T, PACKS, CENTERED, WHOLE> columns(N, skew_of(x + known * args.stride_xm), lanes.lane,
                                                     LANES);
  const auto first_of = [&](int i) { return columns.first_of(i); };
  Pack<T> weights[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) weights[i] = load_weights<T>(args.weight, 0, first_of(i), N);
  const auto weight_of = [&](int i) {
    if constexpr (AFFINE == Affine::GIVEN) return weights[i];
    if constexpr (AFFINE == Affine::NONE) return NoWeights{};
  };

  const auto load_from = [&](Pack<T>(&packs)[PACKS], const void* matrix, int64_t at, int64_t stride,
                             bool wanted) {
    if constexpr (WHOLE) {
      load_touching_packs(packs, static_cast<const T*>(matrix) + at * stride, wanted ? N : 0, first_of);
    } else {
      lanes.load(packs, matrix, at, stride, wanted);
    }
  };
  const auto finish = [&](Pack<T>(&packs)[PACKS], const void* matrix, int64_t at, int64_t stride,
                          bool wanted) {
    if (!WHOLE) lanes.finish_load(packs, matrix, at, stride, wanted);
  };
  HeldRows<T, PACKS> row, next;
  float next_mean = 0.0f, next_rstd = 0.0f;
  // Groups past the last row stay for the shuffles, with rows of zeros.
  const auto load = [&](HeldRows<T, PACKS>& rows, int64_t at) {
    const int64_t inside = min(at, args.M - 1);
    load_from(rows.x, args.x, inside, args.stride_xm, at < args.M);
    load_from(rows.dout, args.dout, inside, args.stride_dm, at < args.M);
    if (CENTERED) next_mean = args.mean[inside];
    next_rstd = args.rstd[inside];
  };
  load(next, index);
  for (int64_t base = index - group; base < args.M; base += step, index += step) {
    const float mean = next_mean, rstd = next_rstd;
    const bool has_added = args.dadded && index < args.M;
    row = next;
    Pack<T> added[PACKS];
    if constexpr (!WHOLE) lanes.load(added, args.dadded, index, args.stride_am, has_added);
    load(next, index + step);
    finish(row.x, args.x, index, args.stride_xm, index < args.M);
    finish(row.dout, args.dout, index, args.stride_dm, index < args.M);
    row.template finish_load<WHOLE>(N, first_of);
    const GradientSums sums = lanes_sum<LANES>(columns.add(row, mean, rstd, weight_of));
    if (index >= args.M) continue;
    if constexpr (!WHOLE) lanes.finish_load(added, args.dadded, index, args.stride_am, has_added);
    const T* const added_row =
        has_added ? static_cast<const T*>(args.dadded) + index * args.stride_am : nullptr;
    columns.write(row, static_cast<T*>(args.dx) + index * N, mean, rstd,
                  {sums.product / static_cast<float>(N), sums.plain / static_cast<float>(N)}, weight_of,
                  [&](int i, int first) {
                    // Loaded as late as this: before, its registers would cost a block of an SM.
                    if constexpr (WHOLE) return load_added<true>(added_row, first, N);
                    if constexpr (!WHOLE) return added[i];
                  });
  }

  if (AFFINE == Affine::NONE || workspace == nullptr) return;
  leave_sums<ROWS>(columns, group, dweight, dbias, N, workspace);
#endif
}

// A lane's packs of a row, shifted together: each begins `skew` elements into the lane's word of 16 bytes,
// and ends in the next lane's, or in the first lane's next one. All lanes of a warp call it.
template <int LANES, typename T, int PACKS>
__device__ void shift_together(Pack<T> (&to)[PACKS], const Pack<T> (&words)[PACKS], int skew) {
  const int lane = threadIdx.x % LANES, after = (lane + 1) % LANES;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const uint4 low = words[i].words, beyond = i + 1 < PACKS ? words[(i + 1) % PACKS].words : uint4{};
    const auto next = [&](uint32_t mine, uint32_t first) {
      return __shfl_sync(0xffffffff, lane == 0 ? first : mine, after, LANES);
    };
    const uint4 high = make_uint4(next(low.x, beyond.x), next(low.y, beyond.y), next(low.z, beyond.z),
                                  next(low.w, beyond.w));
    to[i] = put_together<T>(low, high, skew);
  }
}

// Stores a lane's packs to a row of n elements, of any skew, by aligned words of 16 bytes that are put
// together from neighbouring packs. The row's first elements up to such a word, and those behind the last
// one, are stored one by one. All lanes of a warp call it; `n` is 0 for lanes without a row.
template <int LANES, typename T, int PACKS>
__device__ void store_apart(T* row, const Pack<T> (&packs)[PACKS], int n) {
  constexpr int SIZE = Pack<T>::SIZE;
  const int lane = threadIdx.x % LANES, ahead = (SIZE - skew_of(row)) % SIZE;
  Pack<T> words[PACKS];  // from element `ahead` of each pack on
  shift_together<LANES>(words, packs, ahead);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int first = (i * LANES + lane) * SIZE;
    const bool is_first = lane == 0 && i == 0;
    const bool takes = first + ahead + SIZE <= n;
    const bool gives = !is_first && first + ahead <= n;  // its first elements, to the pack before
    if (takes) __stcs(reinterpret_cast<uint4*>(row + first + ahead), words[i].words);
    if (first >= n || (takes && (gives || ahead == 0))) continue;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      if (!(j < ahead ? gives : takes) && first + j < n) row[first + j] = packs[i][j];
    }
  }
}

// A pack of dx. Rounded before the row's mean is subtracted, so that it is exactly 0 where a row has one
// element. `means` are the row's sums divided by N.
template <bool CENTERED, typename T, typename Weights>
__device__ Pack<T> dx_of(const Pack<T>& x, const Pack<T>& dout, const Weights& weights, const Pack<T>& added,
                         float mean, float rstd, GradientSums means) {
  const float of_distance = -means.product * rstd * rstd;
  float results[Pack<T>::SIZE];
#pragma unroll
  for (int j = 0; j < Pack<T>::SIZE; ++j) {
    const float distance = CENTERED ? float_of(x, j) - mean : float_of(x, j);
    float g = __fmul_rn(float_of(dout, j), to_float(weights[j]));
    if (CENTERED) g = __fsub_rn(g, means.plain);
    results[j] = fmaf(rstd, fmaf(distance, of_distance, g), float_of(added, j));
  }
  Pack<T> packed;
  round_to(packed, results);
  return packed;
}

// LANES lanes take one row after the other, whose skew may differ between the matrices. A lane has the same
// columns in all rows, whatever their skew: packs are counted from the row's first element, shifted together
// from aligned words, and apart as dx is stored.
template <typename T, int LANES, int PACKS, bool CENTERED, Affine AFFINE>
__device__ void backward_shifted(const NormBackwardArgs& args, float* workspace) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, ROWS = LANES_THREADS / LANES;
  constexpr int COLUMNS = AFFINE == Affine::GIVEN ? LANES * PACKS * SIZE : 1;
  __shared__ float dweight[COLUMNS], dbias[CENTERED ? COLUMNS : 1];
  if (workspace) allow_dependent_launch();
  const int N = static_cast<int>(args.N), group = threadIdx.x / LANES;
  const LaneRows<T, LANES, PACKS> lanes{args, static_cast<int>(threadIdx.x) % LANES, N};
  GradientColumns<T, PACKS, CENTERED, false> columns(N, 0, lanes.lane, LANES);
  Pack<T> weights[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) weights[i] = load_weights<T>(args.weight, 0, columns.first_of(i), N);
  const auto weight_of = [&](int i) {
    if constexpr (AFFINE == Affine::NONE) return NoWeights{};
    if constexpr (AFFINE == Affine::GIVEN) {
      keep_packed(weights[i]);  // or the compiler keeps them converted to fp32
      return weights[i];
    }
  };
  // Waits for a row's words, and makes packs of the row's elements of them; 0 for those behind it.
  const auto assemble = [&](Pack<T>(&packs)[PACKS], Pack<T>(&words)[PACKS], const void* matrix, int64_t index,
                            int64_t stride, bool wanted) {
    lanes.finish_load(words, matrix, index, stride, wanted);
    shift_together<LANES>(packs, words, skew_of(static_cast<const T*>(matrix) + index * stride));
#pragma unroll
    for (int i = 0; i < PACKS; ++i) mask_beside(packs[i], columns.first_of(i), wanted ? N : 0);
  };

  HeldRows<T, PACKS> next;
  float next_mean = 0.0f, next_rstd = 0.0f;
  // Lanes past the last row stay for the shuffles, without elements.
  const auto load = [&](int64_t at) {
    const int64_t inside = min(at, args.M - 1);
    lanes.load(next.x, args.x, inside, args.stride_xm, at < args.M);
    lanes.load(next.dout, args.dout, inside, args.stride_dm, at < args.M);
    if (CENTERED) next_mean = args.mean[inside];
    next_rstd = args.rstd[inside];
  };
  int64_t at = int64_t{blockIdx.x} * ROWS + group;
  load(at);
  for (; at - group < args.M; at += int64_t{gridDim.x} * ROWS) {
    const bool inside = at < args.M, has_added = inside && args.dadded;
    const int64_t index = min(at, args.M - 1);
    const float mean = next_mean, rstd = next_rstd;
    Pack<T> words[PACKS];
    lanes.load(words, args.dadded, index, args.stride_am, has_added);
    HeldRows<T, PACKS> row;
    assemble(row.x, next.x, args.x, index, args.stride_xm, inside);
    assemble(row.dout, next.dout, args.dout, index, args.stride_dm, inside);
    load(at + int64_t{gridDim.x} * ROWS);
    const GradientSums sums = lanes_sum<LANES>(columns.add(row, mean, rstd, weight_of));
    const GradientSums means = {sums.product / static_cast<float>(N), sums.plain / static_cast<float>(N)};
    Pack<T> added[PACKS] = {};
    if (args.dadded) assemble(added, words, args.dadded, index, args.stride_am, inside);
    Pack<T> dx[PACKS];
#pragma unroll
    for (int i = 0; i < PACKS; ++i)
      dx[i] = dx_of<CENTERED>(row.x[i], row.dout[i], weight_of(i), added[i], mean, rstd, means);
    store_apart<LANES>(static_cast<T*>(args.dx) + index * args.N, dx, inside ? N : 0);
  }
  if (AFFINE == Affine::NONE || workspace == nullptr) return;
  leave_sums<ROWS>(columns, group, dweight, dbias, N, workspace);
#endif
}

// Launches kernel_of(LANES, PACKS)(args, workspace), which are integral constants, with the fewest lanes that
// hold `packs` packs in two each or, of a warp, in up to MOST_PACKS; then add_kernel. The rows of a lane are
// a multiple of `period` apart. False if a row is too long.
template <typename T, int MOST_PACKS, typename KernelOf>
bool launch_lanes(const NormBackwardArgs& args, int64_t packs, int period, bool centered, KernelOf kernel_of,
                  void (*add_kernel)(const float*, int, int64_t, T*, T*)) {
  const auto launch = [&](auto lanes, auto of_lane) {
    const auto kernel = kernel_of(lanes, of_lane);
    ClusterLaunch occupancy(reinterpret_cast<const void*>(kernel), 1, LANES_THREADS, 0, args.stream);
    // If the period is more than run at once, it does no harm.
    const int blocks =
        groups_for(cdiv(args.M, LANES_THREADS / lanes), std::max(occupancy.resident(), period), period);
    launch_with_early_sums<T>(
        args, blocks, centered,
        [&](float* workspace) {
          kernel<<<blocks, LANES_THREADS, 0, args.stream>>>(args, workspace);
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
