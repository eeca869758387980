// wgmma whose first operand lies in registers: what a product left there is multiplied on, without a way
// through shared memory. Compute capability 9.0a only.
#pragma once

#include "lib/ptx/wgmma.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// PTX ISA, "wgmma.mma_async", m64nNk16, and "Register Fragments for wgmma.mma_async.m64nNk16". As
// wgmma_m64k16, but a: [64, 16] in registers. a[0], a[1] of thread t are columns t % 4 * 2 and the next of
// its rows r and r + 8, a[2], a[3] the eighth columns after these: where sums of 16 columns lie, so those
// become a by conversion alone. These registers may not be written between wgmma_fence and the end of the
// wgmma.
template <int N, typename T, bool B_COL>
__device__ inline void wgmma_m64k16_registers(float (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                              bool accumulate) {
  static_assert(N == 64 || N == 128, "these are written out");
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>,
                "T is __nv_bfloat16 or __half");
  constexpr int TRANSPOSE_B = !B_COL;
#define WGMMA_N64(TYPES)                                                                                \
  asm volatile(                                                                                         \
      "{\n"                                                                                             \
      ".reg .pred accumulate;\n"                                                                        \
      "setp.ne.b32 accumulate, %37, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES                                               \
      "\n"                                                                                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,\n"                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},\n"              \
      "{%32, %33, %34, %35}, %36, accumulate, 1, 1, %38;\n"                                             \
      "}\n"                                                                                             \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),       \
        "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),     \
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), \
        "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), \
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), \
        "+f"(sums[30]), "+f"(sums[31])                                                                  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_B))
#define WGMMA_N128(TYPES)                                                                               \
  asm volatile(                                                                                         \
      "{\n"                                                                                             \
      ".reg .pred accumulate;\n"                                                                        \
      "setp.ne.b32 accumulate, %69, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPES                                              \
      "\n"                                                                                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,\n"                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,\n"               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,\n"               \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},\n"              \
      "{%64, %65, %66, %67}, %68, accumulate, 1, 1, %70;\n"                                             \
      "}\n"                                                                                             \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),       \
        "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),     \
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), \
        "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), \
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), \
        "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), \
        "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]), \
        "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), \
        "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), \
        "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]), \
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63])                                  \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_B))
  if constexpr (N == 64) {
    if constexpr (std::is_same_v<T, __half>) {
      WGMMA_N64("f16.f16");
    } else {
      WGMMA_N64("bf16.bf16");
    }
  } else {
    if constexpr (std::is_same_v<T, __half>) {
      WGMMA_N128("f16.f16");
    } else {
      WGMMA_N128("bf16.bf16");
    }
  }
#undef WGMMA_N64
#undef WGMMA_N128
}

#endif  // 9.0a
