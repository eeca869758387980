// Short register-resident rows, one or several a warp: a kernel of layer_norm's v12 and rms_norm's v07. The
// warps of a block share its weights and biases, which lie in shared memory. Terms: docs/glossary.md.
#pragma once

#include <utility>

#include "norm_held.cuh"

// Rows that a warp takes at once. Several misaligned rows share each realigned pack of weights and biases.
template <int PACKS, Alignment ALIGNMENT>
constexpr int WARP_ROWS = ALIGNMENT == Alignment::PACK || PACKS > 4 ? 1
                          : PACKS > 2                               ? 2
                                                                    : 4;
// Threads of a block: in a large block more warps share the weights and biases that it loads; a small one
// starts and ends without waiting for many warps.
template <Alignment ALIGNMENT>
constexpr int WARP_THREADS = ALIGNMENT == Alignment::PACK ? 256 : 128;
// Blocks that an SM must have room for, which bounds a thread's registers.
template <int PACKS, Alignment ALIGNMENT>
constexpr int WARP_BLOCKS = ALIGNMENT == Alignment::PACK ? (PACKS <= 5 ? 3 : 2)
                            : PACKS == 8                 ? 5
                            : PACKS % 2 == 0             ? 6
                                                         : 7;

// A warp takes WARP_ROWS rows of at most 32 * PACKS packs, which lie `period` rows apart.
template <typename T, int PACKS, Norm NORM, Alignment ALIGNMENT>
__device__ void normalise_by_warps(const NormArgs& args, int period) {
  constexpr bool CENTERED = NORM == Norm::LAYER, WHOLE = ALIGNMENT == Alignment::PACK;
  constexpr int ROWS = WARP_ROWS<PACKS, ALIGNMENT>, THREADS = WARP_THREADS<ALIGNMENT>;
  using ItsFactors = HeldFactors<T, PACKS, ALIGNMENT>;
  __shared__ uint4 memory[(CENTERED ? 2 : 1) * ItsFactors::COUNT];

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32;
  const int64_t which = static_cast<int64_t>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  HeldParts<T, ROWS, PACKS> rows(args, which, period);
  // Warps past the last row stay for the barrier, with the last row's values.
  const T* const x = static_cast<const T*>(args.x) + min(rows.first_index, args.M - 1) * args.stride_xm;
  const HeldPart<T, PACKS> part{N, WHOLE ? 0 : skew_of<LINE_BYTES>(x), 0, lane_id};
  char* const bytes = reinterpret_cast<char*>(memory);
  ItsFactors weights(bytes, 0, static_cast<const T*>(args.weight));
  ItsFactors biases(bytes, CENTERED ? 1 : 0, CENTERED ? static_cast<const T*>(args.bias) : nullptr);

  weights.template load<THREADS>(part, threadIdx.x, 1.0f);
  if (CENTERED) biases.template load<THREADS>(part, threadIdx.x, 0.0f);
  cp_async_commit_group();
  const int single = WHOLE ? part.NONE : part.single();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {  // the first row again in place of one beyond the matrix
    const T* const row = x + (rows.is_row(r) ? r * period : 0) * args.stride_xm;
    load_held(rows.packs[r], row, part, 0.0f);
    rows.raw[r] = single != part.NONE ? row[single] : from_float<T>(0.0f);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const MeanSquares whole =
        statistics_of<NORM>(rows.packs[r], part, single != part.NONE, to_float(rows.raw[r]));
    rows.means[r] = whole.mean;
    rows.rstds[r] = rstd_of(whole.squares, N, args.eps);
    if (lane_id == 0 && rows.first_index < args.M && rows.is_row(r)) {
      if (CENTERED) args.mean[rows.first_index + r * period] = whole.mean;
      args.rstd[rows.first_index + r * period] = rows.rstds[r];
    }
  }
  weights.store_rest(part, threadIdx.x);
  if (CENTERED) biases.store_rest(part, threadIdx.x);
  cp_async_wait_group<0>();  // for this thread's copies
  __syncthreads();           // for every thread's copies of weights and biases, or their stand-ins
  if (rows.first_index >= args.M) return;
  rows.template write<NORM>(static_cast<T*>(args.out), part, single, weights, biases);
}

// Launches kernel_of(PACKS, BLOCKS), which are integral constants, with the fewest packs that hold a row;
// BLOCKS is how many blocks an SM must have room for. L1 is small where rows are whole packs and there are no
// biases. False if a row is too long for a warp, or if the grid would have too many blocks.
template <typename T, Norm NORM, Alignment ALIGNMENT, typename KernelOf>
bool launch_by_warps(const NormArgs& args, KernelOf kernel_of) {
  constexpr int THREADS = WARP_THREADS<ALIGNMENT>;
  const auto launch = [&](auto packs) {
    constexpr int ROWS = WARP_ROWS<packs, ALIGNMENT>, BLOCKS = WARP_BLOCKS<packs, ALIGNMENT>;
    const int period = ROWS > 1 ? skew_period<T, LINE_BYTES>(args.stride_xm) : 1;
    const int64_t warps = cdiv(args.M, int64_t{ROWS} * period) * period, blocks = cdiv(warps, THREADS / 32);
    if (blocks > INT32_MAX) return false;
    const auto start = [&](auto kernel) {
      if constexpr (ALIGNMENT == Alignment::PACK && NORM == Norm::RMS) {
        launch_with_small_l1(blocks, THREADS, args.stream, kernel, args, period);
      } else {
        kernel<<<static_cast<unsigned>(blocks), THREADS, 0, args.stream>>>(args, period);
        CUDA_CHECK(cudaGetLastError());
      }
      return true;
    };
    // At four packs, layer_norm's kernel that is bounded for three blocks an SM may use too many registers
    // for a fourth block. If a fourth block lets the whole grid run at once, the kernel that is bounded for
    // four is faster. With fewer packs a fourth block fits either way, with more packs it never does.
    if constexpr (ALIGNMENT == Alignment::PACK && NORM == Norm::LAYER && packs == 4) {
      const int64_t sms = multiprocessor_count();
      if (blocks > BLOCKS * sms && blocks <= (BLOCKS + 1) * sms)
        return start(kernel_of(packs, std::integral_constant<int, BLOCKS + 1>{}));
    }
    return start(kernel_of(packs, std::integral_constant<int, BLOCKS>{}));
  };
  const int64_t packs = ALIGNMENT == Alignment::PACK
                            ? args.N / Pack<T>::SIZE
                            : most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm);
  const auto choose = [&]<int... PACKS>(std::integer_sequence<int, PACKS...>) {
    return ((packs <= 32 * PACKS && launch(std::integral_constant<int, PACKS>{})) || ...);
  };
  return choose(std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 8>{});
}
