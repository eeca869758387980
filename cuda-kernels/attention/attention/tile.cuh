// What a consumer knows of its rows, and how results leave: what all steps from v05 on have in common.
#pragma once

#include "lib/head_tile.cuh"
#include "walk.cuh"

// What a thread knows of its rows, r and r + 8. The sum is of its own columns only.
struct Rows {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A warpgroup stores 64 rows: out divided by the sums, and the sums' logarithms. `place` is the head's first
// row among those of all heads, `row` the thread's first one within the head.
template <typename T, int N>
__device__ inline void store(const Problem& problem, const float (&out)[N], const Rows& rows, int64_t place,
                             int row) {
  constexpr float LN_2 = 0.6931471805599453f;
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    const int in_head = row + half * 8;
    if (in_head >= problem.Sq) continue;
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // 0 if the row sees no key
    T* line = static_cast<T*>(problem.out) + (place + in_head) * problem.D + lane * 2;
#pragma unroll
    for (int j = 0; j < N / 4; ++j) {
      const float* at = &out[j * 4 + half * 2];
      alignas(4) const T pair[2] = {from_float<T>(at[0] * inverse), from_float<T>(at[1] * inverse)};
      if (j * 8 < problem.D)
        *reinterpret_cast<uint32_t*>(line + j * 8) = *reinterpret_cast<const uint32_t*>(pair);
    }
    if (lane == 0) problem.lse[place + in_head] = rows.max[half] * problem.factor * LN_2 + logf(sum);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
