// Short register-resident rows of whole packs, one a warp: a kernel of layer_norm's v12 and rms_norm's v07.
// The warps of a block share its weights and biases, which lie in shared memory. Terms: docs/glossary.md.
#pragma once

#include <utility>

#include "norm_held.cuh"

// In a large block more warps share the weights and biases that it loads.
constexpr int WARP_THREADS = 256;
// Blocks that an SM must have room for, which bounds a thread's registers.
template <int PACKS>
constexpr int WARP_BLOCKS = PACKS <= 5 ? 3 : 2;

// A warp takes a row of at most 32 * PACKS packs.
template <typename T, int PACKS, Norm NORM>
__device__ void normalise_by_warps(const NormArgs& args) {
  constexpr bool CENTERED = NORM == Norm::LAYER;
  using ItsFactors = HeldFactors<T, PACKS, Alignment::PACK>;
  __shared__ uint4 memory[(CENTERED ? 2 : 1) * ItsFactors::COUNT];

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32;
  const int64_t which = static_cast<int64_t>(blockIdx.x) * (WARP_THREADS / 32) + threadIdx.x / 32;
  HeldParts<T, 1, PACKS> row(args, which, 1);
  // Warps past the last row stay for the barrier, with the last row's values.
  const T* const x = static_cast<const T*>(args.x) + min(which, args.M - 1) * args.stride_xm;
  const HeldPart<T, PACKS> part{N, 0, 0, lane_id};
  char* const bytes = reinterpret_cast<char*>(memory);
  ItsFactors weights(bytes, 0, static_cast<const T*>(args.weight));
  ItsFactors biases(bytes, CENTERED ? 1 : 0, CENTERED ? static_cast<const T*>(args.bias) : nullptr);

  weights.template load<WARP_THREADS>(part, threadIdx.x, 1.0f);
  if (CENTERED) biases.template load<WARP_THREADS>(part, threadIdx.x, 0.0f);
  cp_async_commit_group();
  load_held(row.packs[0], x, part, 0.0f);
  const MeanSquares whole = statistics_of<NORM>(row.packs[0], part, false, 0.0f);
  row.means[0] = whole.mean;
  row.rstds[0] = rstd_of(whole.squares, N, args.eps);
  if (lane_id == 0 && which < args.M) {
    if (CENTERED) args.mean[which] = whole.mean;
    args.rstd[which] = row.rstds[0];
  }
  cp_async_wait_group<0>();  // for this thread's copies
  __syncthreads();           // for every thread's copies of weights and biases, or their stand-ins
  if (which >= args.M) return;
  row.template write<NORM>(static_cast<T*>(args.out), part, part.NONE, weights, biases);
}

// Launches kernel_of(PACKS, BLOCKS), which are integral constants, with the fewest packs that hold a row;
// BLOCKS is how many blocks an SM must have room for. L1 is small where there are no biases. False if a row
// is too long for a warp, or if the grid would have too many blocks.
template <typename T, Norm NORM, typename KernelOf>
bool launch_by_warps(const NormArgs& args, KernelOf kernel_of) {
  const int64_t packs = args.N / Pack<T>::SIZE, blocks = cdiv(args.M, WARP_THREADS / 32);
  if (blocks > INT32_MAX) return false;
  const auto start = [&](auto kernel) {
    if constexpr (NORM == Norm::RMS) {
      launch_with_small_l1(blocks, WARP_THREADS, args.stream, kernel, args);
    } else {
      kernel<<<static_cast<unsigned>(blocks), WARP_THREADS, 0, args.stream>>>(args);
      CUDA_CHECK(cudaGetLastError());
    }
    return true;
  };
  const auto launch = [&](auto its_packs) {
    constexpr int BLOCKS = WARP_BLOCKS<its_packs>;
    // At four packs, layer_norm's kernel that is bounded for three blocks an SM may use too many registers
    // for a fourth block. If a fourth block lets the whole grid run at once, the kernel that is bounded for
    // four is faster. With fewer packs a fourth block fits either way, with more packs it never does.
    if constexpr (NORM == Norm::LAYER && its_packs == 4) {
      const int64_t sms = multiprocessor_count();
      if (blocks > BLOCKS * sms && blocks <= (BLOCKS + 1) * sms)
        return start(kernel_of(its_packs, std::integral_constant<int, BLOCKS + 1>{}));
    }
    return start(kernel_of(its_packs, std::integral_constant<int, BLOCKS>{}));
  };
  const auto choose = [&]<int... PACKS>(std::integer_sequence<int, PACKS...>) {
    return ((packs <= 32 * PACKS && launch(std::integral_constant<int, PACKS>{})) || ...);
  };
  return choose(std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 8>{});
}
