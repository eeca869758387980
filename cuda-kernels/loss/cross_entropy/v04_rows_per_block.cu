// cross_entropy v04_rows_per_block: a row gets as many threads as it needs.
//
// Change:   a row of up to 128 packs gets one warp or fewer lanes, so that a warp may hold several rows; it
//           is loaded before its target is looked at. A longer row gets a block of as many threads as have
//           four packs each.
// Why:      of a block of 256 threads half are idle in a row of 1024 bf16 elements, which is 128 packs; the
//           block waits for the target first and at a barrier at the end. Lanes of one warp need only
//           shuffles. In a row of 3072 elements most threads have one pack in flight: blocks of 128 threads
//           have twice as many rows in flight.
// Counter:  at a row of 131,072 nothing changes; at a row of 1024 the time falls.
// Requires: rows of contiguous elements, of fewer than 2^31 elements.
// Routes:   up to 128 packs: lanes of a warp
//           up to 512 packs: a block of 64 or 128 threads
//           longer: v03's kernel
// Source:   one warp a row in PyTorch, aten/src/ATen/native/cuda/PersistentSoftmax.cuh
// Twin:     triton-kernels/loss/cross_entropy/v04_rows_per_block.py
#include <algorithm>

#include "lib/full_lanes.cuh"
#include "lib/load_if.cuh"
#include "loss.cuh"

void cross_entropy_v03_vectorized(const CrossEntropyArgs& args);

namespace {

constexpr int THREADS = 256;
constexpr int BLOCK_PACKS = 4;  // of a thread of a block that has a row

// logits: [M, N], rows stride_lm apart; target, losses, lse: [M]. Each group of LANES lanes holds a row, of
// at most LANES * PACKS packs.
template <typename T, Smoothing SMOOTHING, int LANES, int PACKS>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_v04_rows_per_block_kernel(const CrossEntropyArgs args) {
  constexpr int SIZE = Pack<T>::SIZE, ROWS = THREADS / LANES;
  allow_mean();
  const int N = static_cast<int>(args.N), lane = threadIdx.x % LANES;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  // Lanes past the last row load that row again, since the shuffles need all 32 lanes.
  const int64_t read = min(row, args.M - 1);
  const T* row_logits = static_cast<const T*>(args.logits) + read * args.stride_lm;
  const int skew = skew_of(row_logits);
  const auto first_of = [&](int i) { return (i * LANES + lane) * SIZE - skew; };

  // A ragged pack is loaded as one word with what lies beside the row, and masked, where that is within the
  // matrix: loads of its single elements would wait for the other packs.
  const bool inner = read * args.stride_lm >= SIZE && (args.M - 1 - read) * args.stride_lm >= SIZE;
  const auto is_ragged = [&](int first) { return first < N && first + SIZE > 0 && !is_whole<T>(first, N); };
  Pack<T> packs[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int first = first_of(i);
    packs[i] = pack_of<T>(-INFINITY);
    load_if<Reading::USUAL>(is_whole<T>(first, N) || (inner && is_ragged(first)), row_logits + first,
                            packs[i].words);
  }
  const int64_t target = args.target[read];
  if (!inner) load_other_packs(packs, row_logits, N, true, -INFINITY, first_of);
  const T logit = lane == 0 ? loaded_logit(row_logits, target, args.N) : from_float<T>(0.0f);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (inner && is_ragged(first_of(i))) mask_beside(packs[i], first_of(i), N, -INFINITY);
  }

  RowSums mine;
  add_packs(mine, packs);
#pragma unroll
  for (int i = 0; SMOOTHING == Smoothing::SHARED && i < PACKS; ++i) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      const int at = first_of(i) + j;
      if (at >= 0 && at < N) mine.total += to_float(packs[i][j]);
    }
  }
  const RowSums sums = lanes_merge<SMOOTHING, LANES>(mine);
  if (lane > 0 || row >= args.M) return;
  if (target == args.ignore_index) {
    write_ignored(args, row);
  } else {
    write_loss(args, row, sums, to_float(logit));
  }
}

// A block has a row, of at most BLOCK_THREADS * BLOCK_PACKS packs.
template <typename T, Smoothing SMOOTHING, int BLOCK_THREADS>
__global__ void __launch_bounds__(BLOCK_THREADS)
    cross_entropy_v04_rows_per_block_small_kernel(const CrossEntropyArgs args) {
  __shared__ RowSums parts[32];
  loss_of_block_row<T, SMOOTHING, BLOCK_THREADS, BLOCK_PACKS>(args, blockIdx.x, parts);
}

template <typename T, Smoothing SMOOTHING, int BLOCK_THREADS>
bool launch_small(const CrossEntropyArgs& args) {
  cross_entropy_v04_rows_per_block_small_kernel<T, SMOOTHING, BLOCK_THREADS>
      <<<static_cast<unsigned>(args.M), BLOCK_THREADS, 0, args.stream>>>(args);
  return true;
}

template <typename T, Smoothing SMOOTHING>
bool launch(const CrossEntropyArgs& args) {
  // Rows of no class are v03's: lanes read words beside a row, and here there may be no memory at all.
  if (args.N == 0) return false;
  const bool skewed = reinterpret_cast<uintptr_t>(args.logits) % 16 || args.stride_lm % Pack<T>::SIZE;
  const int64_t packs = skewed ? most_packs<T>(args.N) : cdiv(args.N, Pack<T>::SIZE);
  const bool launched = choose_full_lanes<2>(packs, [&](auto lanes, auto each) {
    const int64_t blocks = cdiv(args.M, THREADS / lanes);
    cross_entropy_v04_rows_per_block_kernel<T, SMOOTHING, lanes, each>
        <<<static_cast<unsigned>(blocks), THREADS, 0, args.stream>>>(args);
  });
  if (launched) return true;
  // More rows than a grid has blocks are v03's, which launches several: one row may be seen by all.
  if (args.M > INT32_MAX) return false;
  if (packs <= 64 * BLOCK_PACKS) return launch_small<T, SMOOTHING, 64>(args);
  if (packs <= 128 * BLOCK_PACKS) return launch_small<T, SMOOTHING, 128>(args);
  return false;
}

}  // namespace

void cross_entropy_v04_rows_per_block(const CrossEntropyArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool launched =
        args.smoothing > 0.0f ? launch<T, Smoothing::SHARED>(args) : launch<T, Smoothing::NONE>(args);
    if (!launched) cross_entropy_v03_vectorized(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
