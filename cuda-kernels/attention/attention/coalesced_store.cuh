// How v14's results leave.
#pragma once

#include "lib/head_store.cuh"
#include "tile.cuh"
#include "work.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A warpgroup stores the rows of its 64 that exist: out divided by the sums, and the sums' logarithms. `row`
// is the thread's first one.
template <typename T, int N>
__device__ inline void store(const AnyProblem& problem, const float (&out)[N], const Rows& rows,
                             const Task& task, int row) {
  constexpr float LN_2 = 0.6931471805599453f;
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    inverse[half] = sum == 0.0f ? 0.0f : 1.0f / sum;  // 0 if the row sees no key
    const int64_t head = static_cast<int64_t>(task.batch) * problem.heads + task.head;
    if (row + half * 8 < task.Sq && threadIdx.x % 4 == 0)
      problem.lse[head * problem.Sq + task.first_q + row + half * 8] =
          rows.max[half] * problem.factor * LN_2 + logf(sum);
  }
  const HeadStrides& stride = problem.out_stride;
  T* head = static_cast<T*>(problem.out) + task.batch * stride.batch + task.head * stride.head;
  store_wide(head + task.first_q * stride.row, stride.row, out, inverse, row, task.Sq, problem.D);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
