// The wgmma of 8, 16 and 32 columns. Compute capability 9.0a only.
#pragma once

#include "wgmma.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// As wgmma_m64k16 for N = 8, 16 or 32, of a K-major b.
template <int N, typename T, bool A_COL>
__device__ inline void wgmma_m64k16_narrow(float (&sums)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N == 8 || N == 16 || N == 32, "these are written out");
  constexpr int TRANSPOSE_A = A_COL;
#define WGMMA_N8(TYPES)                                            \
  asm volatile(                                                    \
      "{\n"                                                        \
      ".reg .pred accumulate;\n"                                   \
      "setp.ne.b32 accumulate, %6, 0;\n"                           \
      "wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPES           \
      "\n"                                                         \
      "{%0, %1, %2, %3}, %4, %5, accumulate, 1, 1, %7, 0;\n"       \
      "}\n"                                                        \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
      : "l"(a), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_A))
#define WGMMA_N16(TYPES)                                                                          \
  asm volatile(                                                                                   \
      "{\n"                                                                                       \
      ".reg .pred accumulate;\n"                                                                  \
      "setp.ne.b32 accumulate, %10, 0;\n"                                                         \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPES                                         \
      "\n"                                                                                        \
      "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, accumulate, 1, 1, %11, 0;\n"                     \
      "}\n"                                                                                       \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), \
        "+f"(sums[6]), "+f"(sums[7])                                                              \
      : "l"(a), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_A))
#define WGMMA_N32(TYPES)                                                                            \
  asm volatile(                                                                                     \
      "{\n"                                                                                         \
      ".reg .pred accumulate;\n"                                                                    \
      "setp.ne.b32 accumulate, %18, 0;\n"                                                           \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPES                                           \
      "\n"                                                                                          \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15},\n"                   \
      "%16, %17, accumulate, 1, 1, %19, 0;\n"                                                       \
      "}\n"                                                                                         \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),   \
        "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), \
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15])                              \
      : "l"(a), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_A))
  constexpr bool HALF = std::is_same_v<T, __half>;
  if constexpr (N == 8 && HALF) WGMMA_N8("f16.f16");
  if constexpr (N == 8 && !HALF) WGMMA_N8("bf16.bf16");
  if constexpr (N == 16 && HALF) WGMMA_N16("f16.f16");
  if constexpr (N == 16 && !HALF) WGMMA_N16("bf16.bf16");
  if constexpr (N == 32 && HALF) WGMMA_N32("f16.f16");
  if constexpr (N == 32 && !HALF) WGMMA_N32("bf16.bf16");
#undef WGMMA_N8
#undef WGMMA_N16
#undef WGMMA_N32
}

#endif  // 9.0a
