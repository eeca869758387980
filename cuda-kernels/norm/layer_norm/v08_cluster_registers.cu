// layer_norm v08_cluster_registers: a cluster holds two register-resident rows.
//
// Change:   a warp loads its parts of two rows, 1.5 KiB to 4 each, straight to registers, and sends means
//           and squares to all blocks by itself. Weights and biases travel to shared memory once for both
//           rows, through L1, as they lie in memory. With a residual a cluster holds one row.
// Why:      the blocks of v05 meet at a barrier for every sum, and their rows wait in shared memory. Small
//           blocks that come and go keep more of the memory busy. For misaligned rows v05 shifts weights and
//           biases together anew for every skew. From L2 all SMs would read those of a short row, which lie
//           in few of its slices; in an SM's L1 every block after the first finds them. Predictions one to
//           three are for a form that takes misaligned rows alone, the next two for one without parts of 1.5
//           KiB that leaves residuals to another step, the next two for one without parts of 4 KiB. Trials
//           ran before all.
// Counter:  long_scoreboard falls; time falls at rows of 4096, 5003, 65536 and 262144, most at one of 50257.
// Requires: compute capability 9.0; contiguous rows.
//           - from 4 KiB on, or 6 KiB for whole packs without a residual, up to what a cluster holds, if all
//             matrices have x's skew: this step's kernel. A cluster holds 512 KiB if rows start on lines
//             without a residual, else 320 KiB, less up to a line if rows do not start on lines.
//           - others: v05_cluster
// Source:   quack's softmax, whose clusters have parts as small and exchange warp by warp
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "norm/norm_held.cuh"

void layer_norm_v05_cluster(const LayerNormArgs& args);

namespace {

// The least bytes of a row for this step: of whole packs without a residual, and of others.
constexpr int64_t WHOLE_ROW = 6 * 1024, ROW = 4 * 1024;
// Bytes of a row above which a thread holds MOST_HELD_PACKS, as many packs as it has registers for: blocks of
// four warps would not hold two such rows in smaller parts. Rows that do not start on lines are faster in
// smaller parts all the same.
constexpr int64_t LONG_ROW = 4 * 32 * MOST_CLUSTER_BLOCKS * HELD_PACKS * 16;
// Blocks of HELD_THREADS that an SM runs at once: a thread has 80 registers, or 128 for many packs.
template <int PACKS>
constexpr int BLOCKS = PACKS == MOST_HELD_PACKS ? 2 : 3;
// Rows that a cluster takes at once; a residual takes the registers of the second.
constexpr int rows_of(Residual residual) { return residual == Residual::ADDED ? 1 : 2; }

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

// A cluster of `blocks` blocks takes one or two rows at once, which lie `period` rows apart. A thread holds
// PACKS packs of each. Every warp sends the statistics of its parts to all blocks, and waits for those of the
// others; weights and biases travel to shared memory meanwhile.
template <typename T, int PACKS, Alignment ALIGNMENT, Residual RESIDUAL>
__global__ void __launch_bounds__(HELD_THREADS, BLOCKS<PACKS>)
    layer_norm_v08_cluster_registers_kernel(const LayerNormArgs args, int blocks, int period) {
#if __CUDA_ARCH__ >= 900
  constexpr int ROWS = rows_of(RESIDUAL);
  constexpr bool LINED = ALIGNMENT == Alignment::LINE;
  extern __shared__ __align__(128) char memory[];
  __shared__ WarpExchange<MeanSquares, ROWS> exchange;

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int warps = blockDim.x / 32, parts = blocks * warps, own = blockIdx.y * warps + warp_id;
  HeldParts<T, ROWS, PACKS> rows(args, blockIdx.x, period);
  if (rows.first_index >= args.M) return;  // the same for all blocks of a cluster
  const T* const x = static_cast<const T*>(args.x) + rows.first_index * args.stride_xm;
  const T* const residual = static_cast<const T*>(args.residual) + rows.first_index * args.stride_rm;
  const HeldPart<T, PACKS> part{N, LINED ? 0 : skew_of<LINE_BYTES>(x), own, lane_id};
  HeldFactors<T, PACKS, ALIGNMENT> weights(memory, warp_id, static_cast<const T*>(args.weight));
  HeldFactors<T, PACKS, ALIGNMENT> biases(memory, warps + warp_id, static_cast<const T*>(args.bias));

  weights.template load<32>(part, lane_id, 1.0f);
  biases.template load<32>(part, lane_id, 0.0f);
  cp_async_commit_group();
  const int single = LINED ? part.NONE : part.single();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {  // the first row again in place of one beyond the matrix
    const T* const row = x + (rows.is_row(r) ? r * period : 0) * args.stride_xm;
    load_held(rows.packs[r], row, part, 0.0f);
    rows.raw[r] = single != part.NONE ? row[single] : from_float<T>(0.0f);
  }
  weights.store_rest(part, lane_id);
  biases.store_rest(part, lane_id);
  exchange.begin(parts);
  if constexpr (RESIDUAL == Residual::ADDED) {
    add_residual(rows.packs[0], rows.raw[0], residual, static_cast<T*>(args.added) + rows.first_index * N,
                 part, single);
  }

  MeanSquares mine[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    mine[r] = statistics_of<Norm::LAYER>(rows.packs[r], part, single != part.NONE, to_float(rows.raw[r]));
  exchange(mine, own, blocks);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const MeanSquares whole =
        merged_parts<Norm::LAYER>(part, parts, [&](int other) { return exchange.at(other, r); });
    rows.means[r] = whole.mean;
    rows.rstds[r] = rstd_of(whole.squares, N, args.eps);
    if (own == 0 && lane_id == 0 && rows.is_row(r)) {
      args.mean[rows.first_index + r * period] = rows.means[r];
      args.rstd[rows.first_index + r * period] = rows.rstds[r];
    }
  }
  cp_async_wait_group<0>();  // for this lane's copies of weights and biases
  __syncwarp();              // for other lanes' copies
  rows.template write<Norm::LAYER>(static_cast<T*>(args.out), part, single, weights, biases);
#endif
}

// False if the GPU has no room for the cluster, or if a row is too long for one.
template <typename T, int PACKS, Alignment ALIGNMENT, Residual RESIDUAL>
bool launch(const LayerNormArgs& args) {
  constexpr int ROWS = rows_of(RESIDUAL);
  constexpr int WARP_BYTES = 2 * HeldFactors<T, PACKS, ALIGNMENT>::COUNT * 16;
  const auto kernel = layer_norm_v08_cluster_registers_kernel<T, PACKS, ALIGNMENT, RESIDUAL>;
  if constexpr (HELD_WARPS * WARP_BYTES + EXCHANGE_BYTES<MeanSquares, ROWS> > 48 * 1024)
    allow_shared_memory(kernel, HELD_WARPS * WARP_BYTES);
  const HeldShape shape(most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm), PACKS);
  const int period = ROWS > 1 ? skew_period<T, LINE_BYTES>(args.stride_xm) : 1;
  return launch_by_rows(cdiv(args.M, int64_t{ROWS} * period) * period, shape, shape.threads / 32 * WARP_BYTES,
                        args.stream, kernel, args, shape.blocks, period);
}

template <typename T>
bool launch(const LayerNormArgs& args) {
  constexpr int SIZE = Pack<T>::SIZE;
  const int64_t bytes = args.N * static_cast<int64_t>(sizeof(T));
  const bool whole = args.N % SIZE == 0 && args.stride_xm % SIZE == 0 &&
                     aligned_to_16_bytes(args.x, args.weight, args.bias, args.out);
  if (bytes < (whole && !args.residual ? WHOLE_ROW : ROW)) return false;
  // All matrices must have x's skew in every row.
  if (!skewed_alike<T>(args.x, args.stride_xm, args.out, args.N)) return false;
  if (args.residual && !(skewed_alike<T>(args.x, args.stride_xm, args.residual, args.stride_rm) &&
                         skewed_alike<T>(args.x, args.stride_xm, args.added, args.N)))
    return false;
  const bool lined = whole && args.stride_xm % LINE_ELEMENTS<T> == 0 &&
                     reinterpret_cast<uintptr_t>(args.x) % LINE_BYTES == 0;
  if (!lined)
    return args.residual ? launch<T, HELD_PACKS, Alignment::ELEMENT, Residual::ADDED>(args)
                         : launch<T, HELD_PACKS, Alignment::ELEMENT, Residual::NONE>(args);
  if (args.residual) return launch<T, HELD_PACKS, Alignment::LINE, Residual::ADDED>(args);
  if (bytes <= FEW_HELD_BYTES) return launch<T, FEW_HELD_PACKS, Alignment::LINE, Residual::NONE>(args);
  return bytes <= LONG_ROW ? launch<T, HELD_PACKS, Alignment::LINE, Residual::NONE>(args)
                           : launch<T, MOST_HELD_PACKS, Alignment::LINE, Residual::NONE>(args);
}

}  // namespace

void layer_norm_v08_cluster_registers(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) layer_norm_v05_cluster(args);
  });
}
