// The statistics of a row of logits, merged from those of its parts, and the row's loss. Terms:
// docs/glossary.md.
#pragma once

#include "args.h"
#include "lib/packs.cuh"
#include "lib/ptx/hopper.cuh"

// Whether all classes share a part of the target's weight. Without it no kernel sums the logits.
enum class Smoothing { NONE, SHARED };

// The kernel behind this one, which adds the losses (function_mean.cu), may be set up once all blocks run. It
// waits for v05's clusters to end.
__device__ inline void allow_mean() {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
}

// The statistics of a row or a part of it. The sum of exponentials is relative to the running maximum:
// Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.
struct RowSums {
  float max = -INFINITY;
  float sum = 0.0f;    // of exp(x - origin(max))
  float total = 0.0f;  // of x, for smoothing alone: masked logits make it -inf
};

// The number that exponents are relative to: the maximum, or 0 if that is minus infinity, since minus
// infinity minus itself is NaN and such a part must add 0.
__device__ inline float origin(float max) { return max == -INFINITY ? 0.0f : max; }

// The part's sum relative to a larger maximum.
__device__ inline float rescaled(const RowSums& part, float max) {
  return part.sum * exp_of(part.max - origin(max));
}

// Merges the statistics of LANES neighbouring lanes; every lane gets the result. All 32 lanes must call.
template <Smoothing SMOOTHING, int LANES = 32>
__device__ RowSums lanes_merge(const RowSums& part) {
  const float max = lanes_max<LANES>(part.max);
  return {max, lanes_sum<LANES>(rescaled(part, max)),
          SMOOTHING == Smoothing::SHARED ? lanes_sum<LANES>(part.total) : 0.0f};
}

// Merges the statistics of all threads of the block, which must be whole warps; the first warp gets the
// result. `parts`: 32 elements of shared memory that no thread still reads.
template <Smoothing SMOOTHING>
__device__ RowSums block_merge(RowSums part, RowSums* parts) {
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  part = lanes_merge<SMOOTHING>(part);
  if (lane_id == 0) parts[warp_id] = part;
  __syncthreads();  // waits for every warp's part
  if (warp_id > 0) return part;
  return lanes_merge<SMOOTHING>(lane_id < blockDim.x / 32 ? parts[lane_id] : RowSums{});
}

// Adds packs, with minus infinity in places without an element. One common maximum, so that the sum so far is
// rescaled once.
template <typename T, int PACKS>
__device__ void add_packs(RowSums& mine, const Pack<T> (&packs)[PACKS]) {
  float max = mine.max;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) max = fmaxf(max, max_of(packs[i]));
  mine.sum = rescaled(mine, max);
  mine.max = max;
  const float from = origin(max);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) mine.sum += exp_of(to_float(packs[i][j]) - from);
  }
}

template <typename T>
__device__ Pack<T> pack_of(float value) {
  Pack<T> pack;
#pragma unroll
  for (int j = 0; j < Pack<T>::SIZE; ++j) set(pack, j, from_float<T>(value));
  return pack;
}

template <typename T>
__device__ float total_of(const Pack<T>& pack) {
  float total = 0.0f;
#pragma unroll
  for (int j = 0; j < Pack<T>::SIZE; ++j) total += to_float(pack[j]);
  return total;
}

// Adds the whole packs [begin, end) of a row, with PACKS loads in flight for each of THREADS threads.
// Evict-first loads, since a row is read once.
template <Smoothing SMOOTHING, int THREADS, int PACKS, typename T>
__device__ void add_row(RowSums& mine, const Pack<T>* row_packs, int begin, int end) {
  constexpr int CHUNK = THREADS * PACKS;
  constexpr bool SMOOTHED = SMOOTHING == Smoothing::SHARED;
  const auto load = [&](int pack) { return Pack<T>{__ldcs(&row_packs[pack].words)}; };
  Pack<T> packs[PACKS];
  int pack = begin + static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (; pack + CHUNK - THREADS < end; pack += CHUNK) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) packs[i] = load(pack + i * THREADS);
    add_packs(mine, packs);
#pragma unroll
    for (int i = 0; SMOOTHED && i < PACKS; ++i) mine.total += total_of(packs[i]);
  }
  if (pack >= end) return;
  // The last round, in which this thread does not have all of its packs.
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    packs[i] = pack + i * THREADS < end ? load(pack + i * THREADS) : pack_of<T>(-INFINITY);
  }
  add_packs(mine, packs);
#pragma unroll
  for (int i = 0; SMOOTHED && i < PACKS; ++i) {
    if (pack + i * THREADS < end) mine.total += total_of(packs[i]);
  }
}

// The ragged ends of a misaligned row: at either end fewer elements than a pack has, one for each of the
// first threads. They are kept as loaded: a conversion would wait for them before the packs are requested.
template <typename T>
struct Edges {
  int first_pack, end_pack;  // whole packs, counted from the one in which the row starts
  const Pack<T>* row_packs;
  bool has_before, has_behind;
  T before, behind;  // minus infinity if there is none

  __device__ Edges(const T* row, int n) {
    constexpr int SIZE = Pack<T>::SIZE;
    const int skew = skew_of(row), thread = static_cast<int>(threadIdx.x);
    first_pack = skew > 0;
    end_pack = (n + skew) / SIZE;
    row_packs = reinterpret_cast<const Pack<T>*>(row - skew);
    const int head = skew > 0 ? min(n, SIZE - skew) : 0;
    const int tail = max(head, end_pack * SIZE - skew);
    has_before = thread < head;
    has_behind = tail + thread < n;
    before = has_before ? row[thread] : from_float<T>(-INFINITY);
    behind = has_behind ? row[tail + thread] : from_float<T>(-INFINITY);
  }

  template <Smoothing SMOOTHING>
  __device__ void add_to(RowSums& mine) const {
    constexpr bool SMOOTHED = SMOOTHING == Smoothing::SHARED;
    const float first = to_float(before), last = to_float(behind);
    const float max = fmaxf(mine.max, fmaxf(first, last)), from = origin(max);
    mine.sum = rescaled(mine, max) + exp_of(first - from) + exp_of(last - from);
    mine.max = max;
    if (SMOOTHED && has_before) mine.total += first;
    if (SMOOTHED && has_behind) mine.total += last;
  }
};

// Writes the results of a row whose target is ignored.
__device__ inline void write_ignored(const CrossEntropyArgs& args, int64_t row) {
  args.losses[row] = 0.0f;
  if (args.lse) args.lse[row] = 0.0f;
}

// Writes the loss of a row from its statistics. `logit` is the target's, NaN if the target is no class.
__device__ inline void write_loss(const CrossEntropyArgs& args, int64_t row, const RowSums& sums,
                                  float logit) {
  // Differences come first: they are exact for nearby values, while adding to a large maximum loses digits.
  const float log_sum = logf(sums.sum);
  float loss = log_sum + (1.0f - args.smoothing) * (sums.max - logit);
  if (args.smoothing > 0.0f) {
    loss += args.smoothing * (sums.max - sums.total / static_cast<float>(args.N));
  }
  args.losses[row] = loss;
  if (args.lse) args.lse[row] = sums.max + log_sum;
}

// The target's logit as it was loaded, NaN if the target is no class. It is not converted: that would wait
// for the load before others are issued.
template <typename T>
__device__ T loaded_logit(const T* row_logits, int64_t target, int64_t n) {
  return target >= 0 && target < n ? row_logits[target] : from_float<T>(NAN);
}

template <typename T>
__device__ float logit_of(const T* row_logits, int64_t target, int64_t n) {
  return to_float(loaded_logit(row_logits, target, n));
}

// The loss of a row that a block of THREADS threads takes, PACKS packs a thread at once. An ignored row is
// not read. `parts`: 32 elements of shared memory.
template <typename T, Smoothing SMOOTHING, int THREADS, int PACKS>
__device__ void loss_of_block_row(const CrossEntropyArgs& args, int64_t row, RowSums* parts) {
  allow_mean();
  const T* row_logits = static_cast<const T*>(args.logits) + row * args.stride_lm;
  const int64_t target = args.target[row];
  if (target == args.ignore_index) {
    if (threadIdx.x == 0) write_ignored(args, row);
    return;
  }

  // Requested here, used at the end: the target's logit and the row's ragged ends.
  const T logit = threadIdx.x == 0 ? loaded_logit(row_logits, target, args.N) : from_float<T>(0.0f);
  const Edges<T> edges(row_logits, static_cast<int>(args.N));

  RowSums mine;
  add_row<SMOOTHING, THREADS, PACKS>(mine, edges.row_packs, edges.first_pack, edges.end_pack);
  edges.template add_to<SMOOTHING>(mine);

  const RowSums sums = block_merge<SMOOTHING>(mine, parts);
  if (threadIdx.x == 0) write_loss(args, row, sums, to_float(logit));
}
