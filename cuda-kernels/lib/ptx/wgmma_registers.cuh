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
  static_assert(N == 64 || N == 128 || N == 256, "these are written out");
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
#define WGMMA_N256(TYPES)                                                                                    \
  asm volatile(                                                                                              \
      "{\n"                                                                                                  \
      ".reg .pred accumulate;\n"                                                                             \
      "setp.ne.b32 accumulate, %133, 0;\n"                                                                   \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPES                                                   \
      "\n"                                                                                                   \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,\n"                             \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,\n"                    \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,\n"                    \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,\n"                    \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,\n"                    \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,\n"                    \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,\n"        \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127},\n"   \
      "{%128, %129, %130, %131}, %132, accumulate, 1, 1, %134;\n"                                            \
      "}\n"                                                                                                  \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),            \
        "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),          \
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]),      \
        "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),      \
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]),      \
        "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]),      \
        "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]), "+f"(sums[40]), "+f"(sums[41]),      \
        "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]), "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]),      \
        "+f"(sums[48]), "+f"(sums[49]), "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]),      \
        "+f"(sums[54]), "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),      \
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), "+f"(sums[64]), "+f"(sums[65]),      \
        "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]),      \
        "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]), "+f"(sums[76]), "+f"(sums[77]),      \
        "+f"(sums[78]), "+f"(sums[79]), "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]),      \
        "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]), "+f"(sums[88]), "+f"(sums[89]),      \
        "+f"(sums[90]), "+f"(sums[91]), "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95]),      \
        "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]), "+f"(sums[100]), "+f"(sums[101]),    \
        "+f"(sums[102]), "+f"(sums[103]), "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]),                 \
        "+f"(sums[107]), "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111]),                 \
        "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), "+f"(sums[115]), "+f"(sums[116]),                 \
        "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]), "+f"(sums[120]), "+f"(sums[121]),                 \
        "+f"(sums[122]), "+f"(sums[123]), "+f"(sums[124]), "+f"(sums[125]), "+f"(sums[126]), "+f"(sums[127]) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_B))
  if constexpr (N == 64) {
    if constexpr (std::is_same_v<T, __half>) {
      WGMMA_N64("f16.f16");
    } else {
      WGMMA_N64("bf16.bf16");
    }
  } else if constexpr (N == 128) {
    if constexpr (std::is_same_v<T, __half>) {
      WGMMA_N128("f16.f16");
    } else {
      WGMMA_N128("bf16.bf16");
    }
  } else {
    if constexpr (std::is_same_v<T, __half>) {
      WGMMA_N256("f16.f16");
    } else {
      WGMMA_N256("bf16.bf16");
    }
  }
#undef WGMMA_N64
#undef WGMMA_N128
#undef WGMMA_N256
}

#endif  // 9.0a
