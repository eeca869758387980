// The losses of few long rows: each is split over as many blocks as fill the GPU.
//
// v05's clusters have up to eight blocks, so one row keeps eight SMs busy, and a hundred rows are more blocks
// than run at once, but not many more. Here as many blocks run as the GPU has room for. Each leaves the
// statistics of its part in memory, and the block of a row that takes the last ticket merges them, always in
// the order of the parts.
#include <algorithm>
#include <limits>

#include "few.h"
#include "lib/ticket.cuh"
#include "loss.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int PACKS = 4;          // in flight a thread
constexpr int BLOCKS_PER_SM = 6;  // that run at once: bounds a thread to 40 registers
constexpr int64_t ROUND = THREADS * PACKS;
constexpr int64_t LEAST_PARTS = 4;  // of a row: fewer save less than the exchange takes

__device__ RowSums merged(const RowSums& a, const RowSums& b) {
  const float max = fmaxf(a.max, b.max);
  return {max, rescaled(a, max) + rescaled(b, max), a.total + b.total};
}

// Statistics that another block wrote, past L1.
__device__ RowSums load_from_l2(const RowSums* place) {
  return {__ldcg(&place->max), __ldcg(&place->sum), __ldcg(&place->total)};
}

// logits: [M, N], rows stride_lm apart; target, losses, lse: [M]; numbers: [M, parts]; counters: [M], 0
// before and after. Block (m, p) has part p of row m. Part 0 has the row's ragged ends, too.
template <typename T, Smoothing SMOOTHING>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    cross_entropy_few_kernel(const CrossEntropyArgs args, RowSums* numbers, unsigned* counters) {
  __shared__ RowSums warps[32];
  allow_mean();
  const int part = static_cast<int>(blockIdx.y), parts = static_cast<int>(gridDim.y);
  const int64_t row = blockIdx.x;
  const T* row_logits = static_cast<const T*>(args.logits) + row * args.stride_lm;
  const int64_t target = args.target[row];
  if (target == args.ignore_index) {  // all blocks of the row take this branch, none a ticket
    if (part == 0 && threadIdx.x == 0) write_ignored(args, row);
    return;
  }

  // Any block may be the last one, which needs the target's logit.
  const T logit = threadIdx.x == 0 ? loaded_logit(row_logits, target, args.N) : from_float<T>(0.0f);
  const Edges<T> edges(row_logits, static_cast<int>(args.N));
  const int each = (edges.end_pack - edges.first_pack + parts - 1) / parts;
  const int begin = edges.first_pack + part * each, end = min(begin + each, edges.end_pack);
  RowSums mine;
  add_row<SMOOTHING, THREADS, PACKS>(mine, edges.row_packs, begin, end);
  if (part == 0) edges.template add_to<SMOOTHING>(mine);
  RowSums sums = block_merge<SMOOTHING>(mine, warps);

  RowSums* const of_row = numbers + row * parts;
  if (threadIdx.x == 0) of_row[part] = sums;
  if (!is_last(counters)) return;
  mine = {};
  for (int other = static_cast<int>(threadIdx.x); other < parts; other += THREADS) {
    mine = merged(mine, load_from_l2(&of_row[other]));
  }
  sums = block_merge<SMOOTHING>(mine, warps);
  if (threadIdx.x == 0) write_loss(args, row, sums, to_float(logit));
}

// As many parts of a row as run at once, of at least a round of a block's loads.
template <typename T>
int64_t parts_of(const CrossEntropyArgs& args) {
  const int64_t room = int64_t{BLOCKS_PER_SM} * multiprocessor_count();
  return std::min(room / std::max<int64_t>(args.M, 1), cdiv(args.N / Pack<T>::SIZE, ROUND));
}

template <typename T, Smoothing SMOOTHING>
void launch(const CrossEntropyArgs& args) {
  const int64_t parts = parts_of<T>(args);
  auto* const numbers = static_cast<RowSums*>(args.memory->workspace(args.M * parts * sizeof(RowSums)));
  auto* const counters = static_cast<unsigned*>(args.memory->zeroed());
  const dim3 grid(static_cast<unsigned>(args.M), static_cast<unsigned>(parts));
  cross_entropy_few_kernel<T, SMOOTHING><<<grid, THREADS, 0, args.stream>>>(args, numbers, counters);
}

}  // namespace

bool are_few_rows(const CrossEntropyArgs& args) {
  if (args.M > static_cast<int64_t>(ZEROED_BYTES / sizeof(unsigned))) return false;
  // As in v03, elements are counted in 32 bits up to THREADS past the row's end.
  if (args.N > std::numeric_limits<int>::max() - THREADS) return false;
  int64_t parts = 1;
  dispatch(args.dtype, [&](auto zero) { parts = parts_of<decltype(zero)>(args); });
  return parts >= LEAST_PARTS;
}

void cross_entropy_few(const CrossEntropyArgs& args) {
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    args.smoothing > 0.0f ? launch<T, Smoothing::SHARED>(args) : launch<T, Smoothing::NONE>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
