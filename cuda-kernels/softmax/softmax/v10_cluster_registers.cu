// softmax v10_cluster_registers: a split row, held in the registers of a cluster.
//
// Change:   each warp of a cluster loads its part of a row, 2.5 or 4 KiB, straight to registers, and sends
//           its own maximum and sum to all blocks of the cluster.
// Why:      v09 keeps a block's part in shared memory: one thread issues the copies, the part is read from
//           there twice, and the block meets at barriers before and after its numbers are known. Smaller
//           blocks, of four warps with 10 KiB instead of 16 with 64 KiB, also start and end in finer steps.
//           Trials of the kernel ran before the predictions.
// Counter:  at a row of 4096, which goes to v09's kernel, nothing changes; at longer rows shared_memory,
//           instructions and time fall.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   up to 16 KiB: v09's kernel, as one block a row is as fast
//           up to 320 KiB, less up to a line of skew: a cluster, five packs a lane
//           up to 512 KiB, less up to a line of skew: a cluster, eight packs a lane
//           longer, without room for the cluster, or if out's skew within 16 bytes differs from x's: v09's
//           kernel
// Source:   quack's softmax, whose clusters have parts as small, and exchange warp by warp
// Twin:     none, see the spec
#include "args.h"
#include "lib/held.cuh"
#include "online.cuh"

void softmax_v09_lines(const SoftmaxArgs& args);

namespace {

constexpr int64_t SHORT_ROW = 16 * 1024;  // bytes up to which one block a row is as fast
constexpr int BLOCKS = 4;                 // of HELD_THREADS on an SM, which bounds a thread to 64 registers

// Defeats common subexpression elimination (CSE) as keep_packed() does, but in ptxas as well, which would
// also keep the fp32 values: `none` is 0, but no compiler can know that.
template <typename T>
__device__ void hide(Pack<T>& pack, uint32_t none) {
  if (sizeof(T) == 4) return;
  pack.words = make_uint4(pack.words.x | none, pack.words.y | none, pack.words.z | none, pack.words.w | none);
}

// x: [M, N], rows stride_xm apart; out: [M, N]. A cluster of `blocks` blocks holds one row.
template <typename T, bool LOG, int PACKS>
__global__ void __launch_bounds__(HELD_THREADS, BLOCKS)
    softmax_v10_cluster_registers_kernel(const T* __restrict__ x, T* __restrict__ out, int N,
                                         int64_t stride_xm, int blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE;
  __shared__ WarpExchange<MaxSum> exchange;

  const int lane_id = threadIdx.x % 32, warps = blockDim.x / 32, parts = blocks * warps;
  const int64_t row = blockIdx.x;
  const T* const row_x = x + row * stride_xm;
  T* const row_out = out + row * N;
  const HeldPart<T, PACKS> part{N, skew_of<LINE_BYTES>(row_x),
                                static_cast<int>(blockIdx.y * warps + threadIdx.x / 32), lane_id};

  Pack<T> held[PACKS];
  load_held(held, row_x, part, -INFINITY);
  const int single = part.single();
  T raw = from_float<T>(-INFINITY);
  if (single != part.NONE) raw = row_x[single];
  exchange.begin(parts);

  const float element = to_float(raw);
  float max = element;  // the thread's own, which its exponents are relative to
#pragma unroll
  for (int i = 0; i < PACKS; ++i) max = fmaxf(max, max_of(held[i]));
  float sum = exp_of(element - origin(max));
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    float pack_sum = 0.0f;  // a separate sum a pack: shorter chains of dependent additions
    keep_packed(held[i]);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) pack_sum += exp_of(float_of(held[i], j) - origin(max));
    sum += pack_sum;
  }
  exchange({lanes_merge(MaxSum{max, sum})}, part.own, blocks);

  // The pairs are read from shared memory twice, since there are no registers to keep them.
  MaxSum whole;
#pragma unroll
  for (int i = 0; i < MOST_PARTS / 32; ++i) {
    const int other = 32 * i + lane_id;
    if (other < parts) whole.max = fmaxf(whole.max, exchange.at(other).max);
  }
  whole.max = lanes_max(whole.max);
#pragma unroll
  for (int i = 0; i < MOST_PARTS / 32; ++i) {
    const int other = 32 * i + lane_id;
    if (other < parts) whole.sum += rescaled(exchange.at(other), whole.max);
  }
  whole.sum = lanes_sum(whole.sum);

  const uint32_t none = whole.sum < 0.0f;  // always 0, but only known after the exchange
  const std::conditional_t<LOG, LogSoftmax, Softmax> result(whole);
  T* const first_out = row_out + part.first_of(0);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    float values[SIZE];
    hide(held[i], none);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] = result(to_float(held[i][j]));  // float_of needs more registers
    Pack<T> results;
    round_to(results, values);
    // An explicit 16-byte store: the compiler would split a plain one into smaller stores.
    if (part.holds(i)) __stwb(reinterpret_cast<uint4*>(first_out + 32 * i * SIZE), results.words);
  }
  if (single != part.NONE) row_out[single] = from_float<T>(result(element));
#endif
}

// Returns false, without a launch, if the skews of x and out differ, the row is too long, or the GPU has no
// room for the cluster.
template <typename T, bool LOG, int PACKS>
bool launch(const SoftmaxArgs& args) {
  if (!skewed_alike<T>(args.x, args.stride_xm, args.out, args.N)) return false;
  const HeldShape shape(most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm), PACKS);
  return launch_by_rows(args.M, shape, 0, args.stream, softmax_v10_cluster_registers_kernel<T, LOG, PACKS>,
                        static_cast<const T*>(args.x), static_cast<T*>(args.out), static_cast<int>(args.N),
                        args.stride_xm, shape.blocks);
}
template <typename T, bool LOG>
bool launch(const SoftmaxArgs& args) {
  if (args.N * static_cast<int64_t>(sizeof(T)) <= SHORT_ROW) return false;
  return launch<T, LOG, HELD_PACKS>(args) || launch<T, LOG, MOST_HELD_PACKS>(args);
}

}  // namespace

void softmax_v10_cluster_registers(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!(args.log ? launch<T, true>(args) : launch<T, false>(args))) softmax_v09_lines(args);
  });
}
