// The wgmma of 32 columns. Compute capability 9.0 with its own features (sm_90a).
#pragma once

#include "wgmma.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// As wgmma_m64k16 for N = 32, of a K-major a and a K-major b.
template <typename T>
__device__ inline void wgmma_m64n32k16(float (&sums)[16], uint64_t a, uint64_t b, bool accumulate) {
#define WGMMA_N32(TYPES)                                                                            \
  asm volatile(                                                                                     \
      "{\n"                                                                                         \
      ".reg .pred accumulate;\n"                                                                    \
      "setp.ne.b32 accumulate, %18, 0;\n"                                                           \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPES                                           \
      "\n"                                                                                          \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15},\n"                   \
      "%16, %17, accumulate, 1, 1, 0, 0;\n"                                                         \
      "}\n"                                                                                         \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),   \
        "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), \
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15])                              \
      : "l"(a), "l"(b), "r"(int{accumulate}))
  if constexpr (std::is_same_v<T, __half>) {
    WGMMA_N32("f16.f16");
  } else {
    WGMMA_N32("bf16.bf16");
  }
#undef WGMMA_N32
}

#endif  // 9.0a
