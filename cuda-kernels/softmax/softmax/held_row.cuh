// The kernel of softmax's v11 to v13: register-resident rows of up to 16 KiB, held by one warp or by the
// warps of a block. Terms: docs/glossary.md.
#pragma once

#include <utility>

#include "args.h"
#include "lib/held.cuh"
#include "online.cuh"

// Limits of packs a lane. A warp alone holds rows of up to MOST_ALONE_PACKS; for longer rows a block was
// faster in trials. A block of up to four warps holds FEW_BLOCK_PACKS, one of up to eight warps BLOCK_PACKS.
constexpr int MOST_ALONE_PACKS = 7, FEW_BLOCK_PACKS = 3, BLOCK_PACKS = 4;
constexpr int FEW_BLOCK_THREADS = 128, BLOCK_THREADS = 256;  // most threads a block
constexpr int ALONE_THREADS = 128;                           // of a block whose warps hold a row each
// Blocks an SM must have room for, if warps hold rows alone. This bounds the registers of a thread: 40 for
// two packs, 48 for three, 64 for four or five, 80 for more.
template <int PACKS>
constexpr int ALONE_BLOCKS = PACKS == 1   ? 16
                             : PACKS == 2 ? 12
                             : PACKS == 3 ? 10
                             : PACKS <= 5 ? 8
                                          : 6;

// The distribution of a row: over one warp if ALONE, otherwise over the warps of a block.
template <int PACKS_A_LANE, bool ALONE_IN_WARP>
struct HeldAs {
  static constexpr int PACKS = PACKS_A_LANE;
  static constexpr bool ALONE = ALONE_IN_WARP;
  static constexpr bool FEW = PACKS == FEW_BLOCK_PACKS;
  static constexpr int THREADS = ALONE ? ALONE_THREADS : FEW ? FEW_BLOCK_THREADS : BLOCK_THREADS;
  static constexpr int BLOCKS = ALONE ? ALONE_BLOCKS<PACKS> : FEW ? 10 : 4;  // 48 or 64 registers
};

// x: [M, N], rows stride_xm apart; out: [M, N]. Every warp or block holds one row, in at most PACKS packs a
// lane. LINED: all rows start at a line and consist of whole packs, so the code for ragged ends is left out.
template <typename T, bool LOG, typename As, bool LINED, Skews SKEWS = Skews::ALIKE>
__device__ void softmax_of_held_row(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                    int64_t stride_xm) {
  constexpr int SIZE = Pack<T>::SIZE, COUNT = As::PACKS;
  __shared__ MaxSum parts[32];
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int64_t row =
      As::ALONE ? static_cast<int64_t>(blockIdx.x) * (As::THREADS / 32) + warp_id : blockIdx.x;
  if (As::ALONE && row >= M) return;
  const T* const row_x = x + row * stride_xm;
  T* const row_out = out + row * N;
  const T* const lined = SKEWS == Skews::DIFFER ? row_out : row_x;  // on whose lines packs are laid out
  HeldPart<T, COUNT> part{N, LINED ? 0 : skew_of<LINE_BYTES>(lined), As::ALONE ? 0 : warp_id, lane_id};

  Pack<T> held[COUNT];
  load_part<SKEWS>(held, row_x, part, -INFINITY);
  const int single = LINED ? part.NONE : part.single();
  const float element = single != part.NONE ? to_float(row_x[single]) : -INFINITY;

  float max = element;  // the thread's own, which its exponents are relative to
#pragma unroll
  for (int i = 0; i < COUNT; ++i) max = fmaxf(max, max_of(held[i]));
  float sum = exp_of(element - origin(max));
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    float pack_sum = 0.0f;  // a separate sum a pack: shorter chains of dependent additions
    keep_packed(held[i]);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) pack_sum += exp_of(float_of(held[i], j) - origin(max));
    sum += pack_sum;
  }
  const MaxSum mine{max, sum};
  const MaxSum whole = As::ALONE ? lanes_merge(mine) : block_merge(mine, parts);

  const std::conditional_t<LOG, LogSoftmax, Softmax> result(whole);
  T* const first_out = row_out + part.first_of(0);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    float values[SIZE];
    keep_packed(held[i]);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] = result(to_float(held[i][j]));  // float_of needs more registers
    Pack<T> results;
    round_to(results, values);
    // An explicit 16-byte store: the compiler would split a plain one into smaller stores.
    if (part.holds(i)) __stwb(reinterpret_cast<uint4*>(first_out + 32 * i * SIZE), results.words);
  }
  if (single != part.NONE) row_out[single] = from_float<T>(result(element));
}

// Calls launch(HeldAs, blocks, threads) with the fewest packs a lane that hold a row. Returns false, without
// a launch, for rows of less than LEAST_WARP_PACKS packs or of more than 16 KiB, if the kernel takes ALIKE
// skews and out's differs from x's, or if the grid would be too large.
template <typename T, Skews SKEWS = Skews::ALIKE, typename Launch>
bool launch_held_rows(const SoftmaxArgs& args, Launch launch) {
  const int64_t packs = SKEWS == Skews::DIFFER ? most_packs<T, LINE_BYTES>(args.out, args.N, args.N)
                                               : most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm);
  if (packs < LEAST_WARP_PACKS || args.M > INT32_MAX) return false;
  if (SKEWS == Skews::ALIKE && !skewed_alike<T>(args.x, args.stride_xm, args.out, args.N)) return false;
  const auto by_warp = [&](auto count) {
    if (packs > 32 * count) return false;
    launch(HeldAs<count, true>(), cdiv(args.M, ALONE_THREADS / 32), ALONE_THREADS);
    return true;
  };
  const auto by_block = [&](auto count) {
    using As = HeldAs<count, false>;
    if (packs > count * As::THREADS) return false;
    launch(As(), args.M, 32 * cdiv(packs, 32 * count));
    return true;
  };
  const auto by_warps = [&]<int... COUNTS>(std::integer_sequence<int, COUNTS...>) {
    return (by_warp(std::integral_constant<int, COUNTS + 1>{}) || ...);
  };
  return by_warps(std::make_integer_sequence<int, MOST_ALONE_PACKS>{}) ||
         by_block(std::integral_constant<int, FEW_BLOCK_PACKS>{}) ||
         by_block(std::integral_constant<int, BLOCK_PACKS>{});
}
