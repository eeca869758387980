// rms_norm v05_cluster_registers: a cluster holds a register-resident row.
//
// Change:   a warp loads its part of a row, 1.5 KiB to 4, straight to registers, and sends its sum of squares
//           to all blocks by itself; weights travel to shared memory meanwhile, through L1. A row of 22.5 to
//           24 KiB that starts on a line goes to one block of sixteen warps.
// Why:      the blocks of v02 meet at barriers, and their rows wait in shared memory; small blocks that come
//           and go keep more of the memory busy. Weights that other blocks of an SM have loaded are in its
//           L1; from L2 they would be as many bytes as the rows. Two predictions came with parts of 1.5 KiB
//           and with residuals, the next one with one block for rows of 24 KiB. Trials ran before all.
// Counter:  time falls at rows of 4096, 12288, 50257 and 65536, and with a residual.
// Requires: compute capability 9.0; contiguous rows.
//           - from 8 KiB on, or 4 KiB with a residual, up to what a cluster holds, if all matrices have x's
//             skew: this step's kernel. A cluster holds 512 KiB, or 320 KiB with a residual, less up to a
//             line if rows do not start on lines.
//           - others: v02_cluster
// Source:   quack's softmax, whose clusters have parts as small and exchange warp by warp
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "norm/norm_held.cuh"

void rms_norm_v02_cluster(const RmsNormArgs& args);

namespace {

// The least bytes of a row for this step, without a residual and with one.
constexpr int64_t ROW = 8 * 1024, ROW_AND_RESIDUAL = 4 * 1024;
// Bytes of a row from which, with few packs a thread, one block of sixteen warps holds it: it needs no
// cluster, which takes longer to start.
constexpr int64_t LARGE_BLOCK_ROW = FEW_HELD_BYTES - 32 * FEW_HELD_PACKS * 16 + 1;

// Threads that an SM runs at once: one has 64 registers, or 80 where a residual takes some.
constexpr int threads_at_once(Residual residual) { return residual == Residual::ADDED ? 768 : 1024; }

// Adds the residual to the packs and the single element of x, rounds the sum to T, and stores it to `added`.
template <typename T, int PACKS>
__device__ void add_residual(Pack<T> (&packs)[PACKS], T& raw, const T* residual, T* added,
                             const HeldPart<T, PACKS>& part, int single) {
  constexpr int SIZE = Pack<T>::SIZE;
  Pack<T> more[PACKS];
  load_held(more, residual, part, 0.0f);
  if (single != part.NONE) {
    raw = from_float<T>(to_float(raw) + to_float(residual[single]));
    added[single] = raw;
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    float values[SIZE];
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] = float_of(packs[i], j) + float_of(more[i], j);
    round_to(packs[i], values);
    if (part.holds(i)) __stwb(reinterpret_cast<uint4*>(added + part.first_of(i)), packs[i].words);
  }
}

// A cluster of `blocks` blocks takes a row, of which a thread holds PACKS packs. Every warp sends the sum of
// squares of its part to all blocks, and waits for those of the others; weights travel to shared memory
// meanwhile.
template <typename T, int PACKS, Alignment ALIGNMENT, Residual RESIDUAL, int THREADS>
__global__ void __launch_bounds__(THREADS, threads_at_once(RESIDUAL) / THREADS)
    rms_norm_v05_cluster_registers_kernel(const RmsNormArgs args, int blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr bool LINED = ALIGNMENT == Alignment::LINE;
  extern __shared__ __align__(128) char memory[];
  __shared__ WarpExchange<MeanSquares> exchange;

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int warps = blockDim.x / 32, parts = blocks * warps, own = blockIdx.y * warps + warp_id;
  HeldParts<T, 1, PACKS> rows(args, blockIdx.x, 1);
  if (rows.first_index >= args.M) return;  // never: behind the branch the compiler takes fewer registers
  const T* const x = static_cast<const T*>(args.x) + rows.first_index * args.stride_xm;
  const T* const residual = static_cast<const T*>(args.residual) + rows.first_index * args.stride_rm;
  const HeldPart<T, PACKS> part{N, LINED ? 0 : skew_of<LINE_BYTES>(x), own, lane_id};
  HeldFactors<T, PACKS, ALIGNMENT> weights(memory, warp_id, static_cast<const T*>(args.weight));

  weights.template load<32>(part, lane_id, 1.0f);
  cp_async_commit_group();
  const int single = LINED ? part.NONE : part.single();
  load_held(rows.packs[0], x, part, 0.0f);
  rows.raw[0] = single != part.NONE ? x[single] : from_float<T>(0.0f);
  weights.store_rest(part, lane_id);
  exchange.begin(parts);
  if constexpr (RESIDUAL == Residual::ADDED) {
    add_residual(rows.packs[0], rows.raw[0], residual, static_cast<T*>(args.added) + rows.first_index * N,
                 part, single);
  }

  const MeanSquares mine[1] = {
      statistics_of<Norm::RMS>(rows.packs[0], part, single != part.NONE, to_float(rows.raw[0]))};
  exchange(mine, own, blocks);
  const MeanSquares whole =
      merged_parts<Norm::RMS>(part, parts, [&](int other) { return exchange.at(other); });
  rows.rstds[0] = rstd_of(whole.squares, N, args.eps);
  if (own == 0 && lane_id == 0) args.rstd[rows.first_index] = rows.rstds[0];
  cp_async_wait_group<0>();  // for this lane's copies of weights
  __syncwarp();              // for other lanes' copies
  rows.template write<Norm::RMS>(static_cast<T*>(args.out), part, single, weights, weights);
#endif
}

// False if the GPU has no room for the cluster, or if a row is too long for one.
template <typename T, int PACKS, Alignment ALIGNMENT, Residual RESIDUAL, int THREADS = HELD_THREADS>
bool launch(const RmsNormArgs& args) {
  constexpr int WARP_BYTES = HeldFactors<T, PACKS, ALIGNMENT>::COUNT * 16;
  const auto kernel = rms_norm_v05_cluster_registers_kernel<T, PACKS, ALIGNMENT, RESIDUAL, THREADS>;
  if constexpr (THREADS / 32 * WARP_BYTES + EXCHANGE_BYTES<MeanSquares> > 48 * 1024)
    allow_shared_memory(kernel, THREADS / 32 * WARP_BYTES);
  const HeldShape shape(most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm), PACKS, THREADS / 32);
  return launch_by_rows(args.M, shape, shape.threads / 32 * WARP_BYTES, args.stream, kernel, args,
                        shape.blocks);
}
template <typename T, Alignment ALIGNMENT>
bool launch(const RmsNormArgs& args) {
  // More packs a thread would leave no registers for the residual.
  if (args.residual) return launch<T, HELD_PACKS, ALIGNMENT, Residual::ADDED>(args);
  return launch<T, HELD_PACKS, ALIGNMENT, Residual::NONE>(args) ||
         launch<T, MOST_HELD_PACKS, ALIGNMENT, Residual::NONE>(args);
}

template <typename T>
bool launch(const RmsNormArgs& args) {
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  if (bytes < (args.residual ? ROW_AND_RESIDUAL : ROW)) return false;
  // All matrices must have x's skew in every row.
  if (!skewed_alike<T>(args.x, args.stride_xm, args.out, args.N)) return false;
  if (args.residual && !(skewed_alike<T>(args.x, args.stride_xm, args.residual, args.stride_rm) &&
                         skewed_alike<T>(args.x, args.stride_xm, args.added, args.N)))
    return false;
  const bool lined = args.N % Pack<T>::SIZE == 0 && args.stride_xm % LINE_ELEMENTS<T> == 0 &&
                     reinterpret_cast<uintptr_t>(args.x) % LINE_BYTES == 0 &&
                     aligned_to_16_bytes(args.weight, args.out);
  if (!lined) return launch<T, Alignment::ELEMENT>(args);
  if (args.residual || bytes > FEW_HELD_BYTES) return launch<T, Alignment::LINE>(args);
  return bytes >= LARGE_BLOCK_ROW
             ? launch<T, FEW_HELD_PACKS, Alignment::LINE, Residual::NONE, 2 * HELD_THREADS>(args)
             : launch<T, FEW_HELD_PACKS, Alignment::LINE, Residual::NONE>(args);
}

}  // namespace

void rms_norm_v05_cluster_registers(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) rms_norm_v02_cluster(args);
  });
}
