// How v14's results leave: 16 bytes of a row at a time, to rows of any stride.
#pragma once

#include "tile.cuh"
#include "work.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The four lanes of a row transpose their words: lane i gets the words [i] of all four, in the lanes' order.
__device__ inline void transpose(uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int by = 1; by < 4; by *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & by) continue;
      const bool upper = lane & by;
      const uint32_t other = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i + by], by);
      (upper ? words[i] : words[i + by]) = other;
    }
  }
}

// A warpgroup stores the rows of its 64 that exist: out divided by the sums, and the sums' logarithms. `row`
// is the thread's first one.
template <typename T, int N>
__device__ inline void store(const AnyProblem& problem, const float (&out)[N], const Rows& rows,
                             const Task& task, int row) {
  constexpr float LN_2 = 0.6931471805599453f;
  const int lane = threadIdx.x % 4;
  T* head = static_cast<T*>(problem.out) + task.batch * problem.out_stride.batch +
            task.head * problem.out_stride.head;
  float* lse = problem.lse + (static_cast<int64_t>(task.batch) * problem.heads + task.head) * problem.Sq;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // 0 if the row sees no key
    const bool exists = row + half * 8 < task.Sq;
    const int64_t token = int64_t{task.first_q} + row + half * 8;
    T* line = head + token * problem.out_stride.row;
#pragma unroll
    for (int group = 0; group < N / 16; ++group) {  // of 32 columns
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* at = &out[group * 16 + i * 4 + half * 2];
        alignas(4) const T pair[2] = {from_float<T>(at[0] * inverse), from_float<T>(at[1] * inverse)};
        words[i] = *reinterpret_cast<const uint32_t*>(pair);
      }
      transpose(words);
      const int column = group * 32 + lane * 8;
      if (exists && column < problem.D)
        *reinterpret_cast<uint4*>(line + column) = {words[0], words[1], words[2], words[3]};
    }
    if (exists && lane == 0) lse[token] = rows.max[half] * problem.factor * LN_2 + logf(sum);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
