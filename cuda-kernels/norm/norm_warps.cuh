// Short register-resident rows, one or several a warp: the kernel of layer_norm's v09 and rms_norm's v06. The
// warps of a block share its weights and biases, which lie in shared memory. Terms: docs/glossary.md.
#pragma once

#include <utility>

#include "norm_held.cuh"

// Rows that a warp takes at once. Several misaligned rows share each realigned pack of weights and biases.
template <int PACKS, bool WHOLE>
constexpr int WARP_ROWS = WHOLE || PACKS > 4 ? 1
                          : PACKS > 2        ? 2
                                             : 4;
// Threads of a block: in a large block more warps share the weights and biases that it loads; a small one
// starts and ends without waiting for many warps.
template <bool WHOLE>
constexpr int WARP_THREADS = WHOLE ? 256 : 128;
// Blocks that an SM must have room for, which bounds a thread's registers.
template <int PACKS, bool WHOLE>
constexpr int WARP_BLOCKS = WHOLE            ? (PACKS <= 5 ? 3 : 2)
                            : PACKS == 8     ? 5
                            : PACKS % 2 == 0 ? 6
                                             : 7;

// A warp takes WARP_ROWS rows of at most 32 * PACKS packs, which lie `period` rows apart. Without CENTERED
// (rms_norm) the mean is 0. WHOLE: rows of x and out, weights and biases start at multiples of 16 bytes, and
// rows are whole packs.
template <typename T, int PACKS, bool CENTERED, bool WHOLE>
__device__ void normalise_by_warps(const NormArgs& args, int period) {
  using Factors = HeldFactors<T, PACKS, WHOLE>;
  constexpr int ROWS = WARP_ROWS<PACKS, WHOLE>, THREADS = WARP_THREADS<WHOLE>;
  __shared__ uint4 memory[(CENTERED ? 2 : 1) * Factors::COUNT];

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32;
  const int64_t which = static_cast<int64_t>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  HeldRows<T, ROWS, PACKS> rows(args, which, period);
  // Warps past the last row stay for the barrier, with the last row's values.
  const T* const x = static_cast<const T*>(args.x) + min(rows.first_index, args.M - 1) * args.stride_xm;
  const HeldPart<T, PACKS> part{N, WHOLE ? 0 : skew_of<LINE_BYTES>(x), 0, lane_id};
  char* const bytes = reinterpret_cast<char*>(memory);
  Factors weights(bytes, 0, static_cast<const T*>(args.weight));
  Factors biases(bytes, CENTERED ? 1 : 0, CENTERED ? static_cast<const T*>(args.bias) : nullptr);

  weights.template load<THREADS>(part, threadIdx.x, 1.0f);
  if (CENTERED) biases.template load<THREADS>(part, threadIdx.x, 0.0f);
  cp_async_commit_group();
  const int single = WHOLE ? part.NONE : part.single();
  rows.load(x, args.stride_xm, part, single);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const MeanSquares whole =
        moments_of<CENTERED>(rows.packs[r], part, single != part.NONE, to_float(rows.raw[r]));
    rows.means[r] = whole.mean;
    rows.rstds[r] = rstd_of(whole.squares, N, args.eps);
    if (lane_id == 0 && rows.first_index < args.M) rows.template write_numbers<CENTERED>(args, r);
  }
  cp_async_wait_group<0>();  // for this thread's copies
  __syncthreads();           // for every thread's copies of weights and biases, or their stand-ins
  if (rows.first_index >= args.M) return;
  rows.template write<CENTERED>(static_cast<T*>(args.out), part, single, weights, biases);
}

// Launches kernel_of(PACKS, WHOLE, BLOCKS), which are integral constants, with the fewest packs that hold a
// row; BLOCKS is how many blocks an SM must have room for. SMALL_L1: WHOLE rows run with a small L1, as in
// softmax's v13. False if there is a residual, if a row is too long or too short for a warp, if the skew of
// out within 16 bytes differs from x's, or if the grid would have too many blocks.
template <typename T, bool SMALL_L1, typename KernelOf>
bool launch_by_warps(const NormArgs& args, KernelOf kernel_of) {
  if (args.residual || !skewed_alike<T>(args.x, args.stride_xm, args.out, args.N)) return false;
  const auto launch = [&](auto packs, auto whole) {
    constexpr int ROWS = WARP_ROWS<packs, whole>, THREADS = WARP_THREADS<whole>;
    const int period = ROWS > 1 ? skew_period<T, LINE_BYTES>(args.stride_xm) : 1;
    const int64_t warps = cdiv(args.M, int64_t{ROWS} * period) * period, blocks = cdiv(warps, THREADS / 32);
    if (blocks > INT32_MAX) return false;
    const auto start = [&](auto room) {
      const auto kernel = kernel_of(packs, whole, room);
      if constexpr (whole && SMALL_L1) {
        launch_with_small_l1(blocks, THREADS, args.stream, kernel, args, period);
      } else {
        kernel<<<static_cast<unsigned>(blocks), THREADS, 0, args.stream>>>(args, period);
        CUDA_CHECK(cudaGetLastError());
      }
      return true;
    };
    constexpr int BLOCKS = WARP_BLOCKS<packs, whole>;
    // At four packs, a kernel that is bounded for three blocks an SM may use too many registers for a fourth
    // block. If a fourth block lets the whole grid run at once, the kernel that is bounded for four is
    // faster. With fewer packs a fourth block fits either way, with more packs it never does.
    if constexpr (whole && packs == 4) {
      const int64_t sms = multiprocessor_count();
      if (blocks > BLOCKS * sms && blocks <= (BLOCKS + 1) * sms)
        return start(std::integral_constant<int, BLOCKS + 1>{});
    }
    return start(std::integral_constant<int, BLOCKS>{});
  };
  const auto choose = [&]<int... PACKS>(int64_t packs, auto whole, std::integer_sequence<int, PACKS...>) {
    return packs >= LEAST_WARP_PACKS &&
           ((packs <= 32 * PACKS && launch(std::integral_constant<int, PACKS>{}, whole)) || ...);
  };
  using Choices = std::integer_sequence<int, 1, 2, 3, 4, 5, 6, 8>;
  return are_whole<T>(args) ? choose(args.N / Pack<T>::SIZE, std::true_type{}, Choices{})
                            : choose(most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm),
                                     std::false_type{}, Choices{});
}
