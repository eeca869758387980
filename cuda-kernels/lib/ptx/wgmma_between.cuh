// The wgmma of numbers of columns between those of wgmma.cuh. Compute capability 9.0a only.
#pragma once

#include "wgmma.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Sums and their operands' numbers in the instruction, eight or 64 at a time.
#define WGMMA_SUMS_8(I)                                                                      \
  "+f"(sums[I]), "+f"(sums[I + 1]), "+f"(sums[I + 2]), "+f"(sums[I + 3]), "+f"(sums[I + 4]), \
      "+f"(sums[I + 5]), "+f"(sums[I + 6]), "+f"(sums[I + 7])
#define WGMMA_SUMS_64                                                                                       \
  WGMMA_SUMS_8(0), WGMMA_SUMS_8(8), WGMMA_SUMS_8(16), WGMMA_SUMS_8(24), WGMMA_SUMS_8(32), WGMMA_SUMS_8(40), \
      WGMMA_SUMS_8(48), WGMMA_SUMS_8(56)
#define WGMMA_FIRST_64                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
#define WGMMA_NUMBERS_64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_NUMBERS_72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NUMBERS_80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NUMBERS_88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NUMBERS_96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_NUMBERS_104 "%104, %105, %106, %107, %108, %109, %110, %111"

// As wgmma_m64k16 for N = 160, 176 or 224.
template <int N, typename T, bool A_COL, bool B_COL>
__device__ inline void wgmma_m64k16_between(float (&sums)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N == 160 || N == 176 || N == 224, "these are written out");
  constexpr int TRANSPOSE_A = A_COL;
  constexpr int TRANSPOSE_B = !B_COL;
  constexpr bool HALF = std::is_same_v<T, __half>;
#define WGMMA(N, TYPES, NUMBERS, A, B, ACCUMULATE, TRANSPOSED, ...) \
  asm volatile(                                                     \
      "{\n"                                                         \
      ".reg .pred accumulate;\n"                                    \
      "setp.ne.b32 accumulate, " ACCUMULATE                         \
      ", 0;\n"                                                      \
      "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPES        \
      "\n"                                                          \
      "{" NUMBERS "}, " A ", " B ", accumulate, 1, 1, " TRANSPOSED  \
      ";\n"                                                         \
      "}\n"                                                         \
      : WGMMA_SUMS_64, __VA_ARGS__                                  \
      : "l"(a), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B))
#define WGMMA_BOTH(N, ...)                               \
  if constexpr (HALF) WGMMA(#N, "f16.f16", __VA_ARGS__); \
  if constexpr (!HALF) WGMMA(#N, "bf16.bf16", __VA_ARGS__)
  if constexpr (N == 160) {
    WGMMA_BOTH(160, WGMMA_FIRST_64 WGMMA_NUMBERS_64 ", " WGMMA_NUMBERS_72, "%80", "%81", "%82", "%83, %84",
               WGMMA_SUMS_8(64), WGMMA_SUMS_8(72));
  }
  if constexpr (N == 176) {
    WGMMA_BOTH(176, WGMMA_FIRST_64 WGMMA_NUMBERS_64 ", " WGMMA_NUMBERS_72 ", " WGMMA_NUMBERS_80, "%88", "%89",
               "%90", "%91, %92", WGMMA_SUMS_8(64), WGMMA_SUMS_8(72), WGMMA_SUMS_8(80));
  }
  if constexpr (N == 224) {
    WGMMA_BOTH(224,
               WGMMA_FIRST_64 WGMMA_NUMBERS_64 ", " WGMMA_NUMBERS_72 ", " WGMMA_NUMBERS_80
                                               ", " WGMMA_NUMBERS_88 ", " WGMMA_NUMBERS_96
                                               ", " WGMMA_NUMBERS_104,
               "%112", "%113", "%114", "%115, %116", WGMMA_SUMS_8(64), WGMMA_SUMS_8(72), WGMMA_SUMS_8(80),
               WGMMA_SUMS_8(88), WGMMA_SUMS_8(96), WGMMA_SUMS_8(104));
  }
#undef WGMMA
#undef WGMMA_BOTH
}

#undef WGMMA_SUMS_8
#undef WGMMA_SUMS_64
#undef WGMMA_FIRST_64
#undef WGMMA_NUMBERS_64
#undef WGMMA_NUMBERS_72
#undef WGMMA_NUMBERS_80
#undef WGMMA_NUMBERS_88
#undef WGMMA_NUMBERS_96
#undef WGMMA_NUMBERS_104

#endif  // 9.0a
