// The kernel of softmax's v13 for rows of up to 16 KiB, held in the registers of one warp or of the warps of
// a block. Terms: docs/glossary.md.
#pragma once

#include <utility>

#include "register_row.cuh"

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

enum class Holder { WARP, BLOCK };

// Who holds a row, in how many packs a lane.
template <int PACKS_A_LANE, Holder HOLDER>
struct HeldAs {
  static constexpr int PACKS = PACKS_A_LANE;
  static constexpr bool ALONE = HOLDER == Holder::WARP;
  static constexpr bool FEW = PACKS == FEW_BLOCK_PACKS;
  static constexpr int THREADS = ALONE ? ALONE_THREADS : FEW ? FEW_BLOCK_THREADS : BLOCK_THREADS;
  static constexpr int BLOCKS = ALONE ? ALONE_BLOCKS<PACKS> : FEW ? 10 : 4;  // 48 or 64 registers
};

// The ends of rows: WHOLE, if all rows of x start at a line and consist of whole packs, so that the code for
// single elements is left out.
enum class Ends { WHOLE, RAGGED };

// x: [M, N], rows stride_xm apart; out: [M, N]. Every warp or block holds one row, in at most PACKS packs a
// lane.
template <typename T, Form FORM, typename As, Ends ENDS, Skews SKEWS>
__device__ void softmax_of_held_row(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                    int64_t stride_xm) {
  constexpr int COUNT = As::PACKS;
  __shared__ MaxSum parts[32];
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int64_t row =
      As::ALONE ? static_cast<int64_t>(blockIdx.x) * (As::THREADS / 32) + warp_id : blockIdx.x;
  if (As::ALONE && row >= M) return;
  const T* const row_x = x + row * stride_xm;
  T* const row_out = out + row * N;
  const T* const lined = SKEWS == Skews::DIFFER ? row_out : row_x;  // on whose lines packs are laid out
  HeldPart<T, COUNT> part{N, ENDS == Ends::WHOLE ? 0 : skew_of<LINE_BYTES>(lined), As::ALONE ? 0 : warp_id,
                          lane_id};

  Pack<T> held[COUNT];
  load_part<SKEWS>(held, row_x, part, -INFINITY);
  const int single = ENDS == Ends::WHOLE ? part.NONE : part.single();
  const float element = single != part.NONE ? to_float(row_x[single]) : -INFINITY;
  const MaxSum mine = max_sum_of(held, element);
  const MaxSum whole = As::ALONE ? lanes_merge(mine) : block_merge(mine, parts);
  const ResultOf<T, FORM> result(whole);
  T* const first_out = row_out + part.first_of(0);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    keep_packed(held[i]);
    const Pack<T> results = results_of(held[i], result);
    // An explicit 16-byte store: the compiler would split a plain one into smaller stores.
    if (part.holds(i)) __stwb(reinterpret_cast<uint4*>(first_out + 32 * i * Pack<T>::SIZE), results.words);
  }
  if (single != part.NONE) row_out[single] = from_float<T>(result(element));
}

// Calls launch(HeldAs, blocks, threads) with the fewest packs a lane that hold a row. Returns false, without
// a launch, if no block holds it. The grid is never too large: that many such rows would take TiB.
template <typename T, Skews SKEWS, typename Launch>
bool launch_held_rows(const SoftmaxArgs& args, Launch launch) {
  const int64_t packs = SKEWS == Skews::DIFFER ? most_packs<T, LINE_BYTES>(args.out, args.N, args.N)
                                               : most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm);
  const auto by_warp = [&](auto count) {
    if (packs > 32 * count) return false;
    launch(HeldAs<count, Holder::WARP>(), cdiv(args.M, ALONE_THREADS / 32), ALONE_THREADS);
    return true;
  };
  const auto by_block = [&](auto count) {
    using As = HeldAs<count, Holder::BLOCK>;
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
