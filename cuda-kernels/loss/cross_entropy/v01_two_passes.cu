// cross_entropy v01_two_passes: a block reads its row for the maximum, and again for the sum.
//
// Change:   none yet, this is where the ladder starts.
// Why:      the definition, word for word: loss = log(sum(exp(x - max))) + max - x[target]. The second pass
//           misses L2, too: the rows in flight at once are several times as large.
// Counter:  bytes_over_minimum is 2.
// Requires: rows of contiguous elements, of any length.
// Source:   the definition; the smoothed target is that of torch.nn.functional.cross_entropy
// Twin:     triton-kernels/loss/cross_entropy/v01_two_passes.py
#include "args.h"
#include "lib/common.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Merges the values of all threads of the block; every thread gets the result. `parts`: WARPS elements of
// shared memory that no thread still reads.
template <typename Merge>
__device__ float block_merge(float value, float* parts, Merge merge) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = merge(value, __shfl_xor_sync(0xffffffff, value, distance));
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();  // waits for every warp's part
  value = parts[0];
  for (int warp_id = 1; warp_id < WARPS; ++warp_id) value = merge(value, parts[warp_id]);
  return value;
}

// logits: [M, N], rows stride_lm apart; target, losses, lse: [M].
template <typename T>
__global__ void __launch_bounds__(THREADS) cross_entropy_v01_two_passes_kernel(const CrossEntropyArgs args) {
  __shared__ float parts[3][WARPS];
  const int64_t row = blockIdx.x;
  const T* row_logits = static_cast<const T*>(args.logits) + row * args.stride_lm;
  const int64_t target = args.target[row];
  if (target == args.ignore_index) {
    if (threadIdx.x > 0) return;
    args.losses[row] = 0.0f;
    if (args.lse) args.lse[row] = 0.0f;
    return;
  }

  float max = -INFINITY;
  for (int64_t col = threadIdx.x; col < args.N; col += THREADS) max = fmaxf(max, to_float(row_logits[col]));
  max = block_merge(max, parts[0], [](float a, float b) { return fmaxf(a, b); });

  // If the whole row is minus infinity, exponents are relative to 0, since minus infinity minus itself is
  // NaN; its sum is 0. The sum of the logits is computed for smoothing alone, as masked logits make it minus
  // infinity.
  const float origin = max == -INFINITY ? 0.0f : max;
  float sum = 0.0f, total = 0.0f;
  for (int64_t col = threadIdx.x; col < args.N; col += THREADS) {
    const float logit = to_float(row_logits[col]);
    sum += expf(logit - origin);
    if (args.smoothing > 0.0f) total += logit;
  }
  const auto add = [](float a, float b) { return a + b; };
  sum = block_merge(sum, parts[1], add);
  total = block_merge(total, parts[2], add);
  if (threadIdx.x > 0) return;

  // Differences come first: they are exact for nearby values, while adding to a large maximum loses digits.
  const float log_sum = logf(sum);
  const float logit = target >= 0 && target < args.N ? to_float(row_logits[target]) : NAN;
  float loss = log_sum + (1.0f - args.smoothing) * (max - logit);
  if (args.smoothing > 0.0f) loss += args.smoothing * (max - total / static_cast<float>(args.N));
  args.losses[row] = loss;
  if (args.lse) args.lse[row] = max + log_sum;
}

}  // namespace

void cross_entropy_v01_two_passes(const CrossEntropyArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    cross_entropy_v01_two_passes_kernel<T><<<static_cast<unsigned>(args.M), THREADS, 0, args.stream>>>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
