// layer_norm_backward v04_cluster: the blocks of a cluster share a split row.
//
// Change:   a row of more than 16 KiB is split over the blocks of a cluster, which send each other their two
//           sums through DSMEM. Each block keeps the sums of its own columns for dweight and dbias.
// Why:      two rows of 256 K elements and the sums of as many columns are 3 MiB: the registers of sixteen
//           SMs hold that, those of one do not. Every element is read once, and a block sends two numbers a
//           row. Rows of up to 16 KiB keep v03's kernel. Trials ran before.
// Counter:  time falls at a row of 65536, against v01's; at a row of 4096, where v03's kernel runs, nothing
//           moves.
// Requires: compute capability 9.0; contiguous rows.
//           - up to 512 KiB if all rows start and end at multiples of 16 bytes, else 256 KiB: this step's
//             kernels
//           - longer: v01_rows_then_columns
// Source:   CUDA C++ Programming Guide, "Distributed Shared Memory"; PTX ISA, "st.async"
// Gap:      Triton gives a program no access to another one's shared memory.
#include "args.h"
#include "norm/norm_backward.cuh"

void layer_norm_backward_v01_rows_then_columns(const LayerNormBackwardArgs& args);

namespace {

// One block takes a row of up to SHORT_ROW packs; of a longer row a block takes up to PART packs. If 16
// blocks do not hold a row so, blocks have LONG_THREADS, without registers to load the next row ahead.
constexpr int SHORT_PACKS = 2, SHORT_THREADS = 544, SHORT_ROW = 1025;
constexpr int PACKS = 4, PART_THREADS = 256, PART = PACKS * PART_THREADS, LONG_THREADS = 512;
static_assert(SHORT_PACKS * SHORT_THREADS >= SHORT_ROW);

// Persistent clusters of `blocks` blocks over split rows. A block holds at most blockDim.x * PACKS packs of
// each row in registers, and the weights of its columns in shared memory. A cluster leaves one set of partial
// sums for every kind of rows in its share. If NEXT_ROW is AHEAD, the loads of the next row
// are issued before this row is worked on.
template <typename T, int PACKS, int THREADS, Alignment ALIGNMENT, NextRow NEXT_ROW>
__global__ void __launch_bounds__(THREADS)
    layer_norm_backward_v04_cluster_kernel(const LayerNormBackwardArgs args, int period, int blocks, int each,
                                           float* workspace) {
  constexpr bool AHEAD = NEXT_ROW == NextRow::AHEAD;
  extern __shared__ uint4 weights[];  // [PACKS, blockDim.x], every thread's own
  __shared__ Exchange<GradientSums> exchange;
  __shared__ GradientSums warps[2][32];  // rows alternate: warps may still read the other
  const int N = static_cast<int>(args.N);
  const int rank = rank_in_cluster(blocks);
  const int cluster = blockIdx.x / blocks, clusters = gridDim.x / blocks;
  const RowKinds kinds{args.M, ALIGNMENT == Alignment::PACK ? 1 : period};
  const auto share = [&](int of) { return args.M * of / clusters; };  // begins where the one before ends
  const int first_kind = kinds.kind(share(cluster)), last_kind = kinds.kind(share(cluster + 1));
  if (blocks > 1) exchange.begin();

  uint32_t turn = 0;
  for (int kind = first_kind; kind <= last_kind; ++kind) {
    // The rows are index, index + step, ... below `limit`.
    const auto row_at = [&](int64_t place) { return kind + (place - kinds.start(kind)) * kinds.period; };
    const int step = kinds.period > 1 ? kinds.period : clusters;
    int64_t index = cluster, limit = args.M;
    if (kinds.period > 1) {
      index = row_at(max(share(cluster), kinds.start(kind)));
      limit = row_at(min(share(cluster + 1), kinds.start(kind + 1)));
    }
    const T* x = static_cast<const T*>(args.x);
    const Parts<T> parts{N, skew_of(x + kind * args.stride_xm), each};
    const int start = parts.start(rank), n = parts.count(rank);
    x += start;
    const T* dout = static_cast<const T*>(args.dout) + start;
    GradientColumns<T, PACKS, Norm::LAYER, ALIGNMENT> columns(n, skew_of(x + kind * args.stride_xm),
                                                              threadIdx.x, blockDim.x);
    const auto first_of = [&](int i) { return columns.first_of(i); };
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      weights[i * blockDim.x + threadIdx.x] = load_weights<T>(args.weight, start, first_of(i), n).words;
    }
    const auto weight_of = [&](int i) { return Pack<T>{weights[i * blockDim.x + threadIdx.x]}; };

    HeldOperands<T, PACKS> row, next;
    float next_mean = 0.0f, next_rstd = 0.0f;
    const auto load = [&](HeldOperands<T, PACKS>& rows, int64_t at) {
      if (at >= limit) return;
      const bool at_end = is_at_end<T>(args.M, at, args.stride_xm, args.stride_dm);
      rows.template load<ALIGNMENT>(x + at * args.stride_xm, dout + at * args.stride_dm, n, at_end, first_of);
      next_mean = args.mean[at];
      next_rstd = args.rstd[at];
    };
    if (AHEAD) load(next, index);
    if (blocks > 1 && kind == first_kind) exchange.wait_for_all();

    for (; index < limit; index += step, ++turn) {
      if (!AHEAD) load(row, index);
      const float mean = next_mean, rstd = next_rstd;
      if (AHEAD) {
        row = next;
        load(next, index + step);
      }
      row.template finish_load<ALIGNMENT>(n, first_of);
      GradientSums sums = block_sum(columns.add(row, mean, rstd, weight_of), warps[turn % 2]);
      if (blocks > 1) sums = lanes_sum(exchange(sums, rank, blocks, turn));
      const T* added = static_cast<const T*>(args.dadded) + index * args.stride_am + start;
      columns.write(
          row, static_cast<T*>(args.dx) + index * args.N + start, mean, rstd,
          {sums.product / static_cast<float>(N), sums.plain / static_cast<float>(N)}, weight_of,
          [&](int, int first) { return load_added<ALIGNMENT>(args.dadded ? added : nullptr, first, n); });
    }
    if (workspace == nullptr) continue;
    // cluster + kind numbers the sets of partial sums: the next share starts with this one's last kind or the
    // one after it, so no number comes twice.
    const int group = cluster + kind, groups = clusters + kinds.period - 1;
    columns.for_each([&](int col, float of_weight, float of_bias) {
      partial_sums(workspace, 0, groups, args.N, group)[start + col] = of_weight;
      partial_sums(workspace, 1, groups, args.N, group)[start + col] = of_bias;
    });
  }
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_GROUPS)
    layer_norm_backward_v04_cluster_sum_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                               T* dbias) {
  add_partial_sums(workspace, groups, N, dweight, dbias);
}

template <typename T, Alignment ALIGNMENT>
bool launch(const LayerNormBackwardArgs& args) {
  const auto sum_kernel = layer_norm_backward_v04_cluster_sum_kernel<T>;
  const int64_t packs = packs_of<T>(args);
  if (packs <= SHORT_ROW) {
    return launch_persistent<T>(
        args,
        layer_norm_backward_v04_cluster_kernel<T, SHORT_PACKS, SHORT_THREADS, ALIGNMENT, NextRow::AHEAD>, 1,
        SHORT_PACKS, true, sum_kernel, 1, static_cast<int>(packs));
  }
  int blocks = 2;
  while (blocks < MOST_CLUSTER_BLOCKS && packs > blocks * PART) blocks *= 2;
  const int each = static_cast<int>(cdiv(packs, blocks));
  if (packs <= blocks * PART) {
    return launch_persistent<T>(
        args, layer_norm_backward_v04_cluster_kernel<T, PACKS, PART_THREADS, ALIGNMENT, NextRow::AHEAD>,
        blocks, PACKS, true, sum_kernel, blocks, each);
  }
  // Misaligned rows need masks, beside which the sums of so many columns do not fit the registers.
  if constexpr (ALIGNMENT == Alignment::PACK) {
    if (packs > blocks * PACKS * LONG_THREADS) return false;
    return launch_persistent<T>(
        args, layer_norm_backward_v04_cluster_kernel<T, PACKS, LONG_THREADS, ALIGNMENT, NextRow::IN_TURN>,
        blocks, PACKS, true, sum_kernel, blocks, each);
  }
  return false;
}

}  // namespace

void layer_norm_backward_v04_cluster(const LayerNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!(are_whole<T>(args) ? launch<T, Alignment::PACK>(args) : launch<T, Alignment::ELEMENT>(args)))
      layer_norm_backward_v01_rows_then_columns(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
