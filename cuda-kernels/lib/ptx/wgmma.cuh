// Thin wrappers of wgmma, which multiplies tiles in shared memory by a warpgroup: four warps, the first of
// which has a number divisible by 4. Compute capability 9.0a only. Each names its section of the PTX ISA.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lib/common.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// PTX ISA, "wgmma.fence". Orders this warpgroup's earlier accesses of the sums' registers before its next
// wgmma.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// PTX ISA, "wgmma.commit_group". The warpgroup's wgmma since the last commit become one group.
__device__ inline void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// PTX ISA, "wgmma.wait_group". Waits until all but the newest PENDING groups have ended: their tiles may be
// overwritten, and with PENDING = 0 the sums may be read.
template <int PENDING>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// PTX ISA, "Matrix Descriptor Format". The descriptor of a tile with rows of 128 bytes, swizzled as the TMA
// does with CU_TENSOR_MAP_SWIZZLE_128B; eight rows, 1024 bytes, are an aligned unit. In a K-major tile [MN,
// 64] rows run along K, in an MN-major tile [K, 64] along M or N. An MN-major tile wider than 64 is several
// tiles, `next_64` bytes apart.
__device__ inline uint64_t wgmma_tile(const void* tile, uint32_t next_64 = 16) {
  constexpr uint64_t SWIZZLE_128B = 1;
  constexpr uint64_t EIGHT_ROWS = 1024;
  return (shared_address(tile) & 0x3ffff) >> 4 | static_cast<uint64_t>(next_64 >> 4) << 16 |
         (EIGHT_ROWS >> 4) << 32 | SWIZZLE_128B << 62;
}

// PTX ISA, "wgmma.mma_async", m64nNk16. sums (+)= a @ b for bf16 or fp16 (T), summed in fp32; without
// `accumulate` the products replace the sums. a: [64, 16], b: [16, N], described by wgmma_tile. By default a
// is K-major and b N-major; A_COL makes a M-major, B_COL makes b K-major.
//
// Thread t of the warpgroup holds row r = t / 32 * 16 + t % 32 / 4 and row r + 8: sums[4 j], [4 j + 1] are
// columns 8 j + t % 4 * 2 and the next of row r, sums[4 j + 2], [4 j + 3] the same columns of row r + 8.
template <int N, typename T, bool A_COL, bool B_COL>
__device__ inline void wgmma_m64k16(float (&sums)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N == 64 || N == 80 || N == 128 || N == 192 || N == 256, "these are written out");
  static_assert(std::is_same_v<T, __nv_bfloat16> || std::is_same_v<T, __half>,
                "T is __nv_bfloat16 or __half");
  constexpr int TRANSPOSE_A = A_COL;
  constexpr int TRANSPOSE_B = !B_COL;
#define WGMMA_N64(TYPES)                                                                                \
  asm volatile(                                                                                         \
      "{\n"                                                                                             \
      ".reg .pred accumulate;\n"                                                                        \
      "setp.ne.b32 accumulate, %34, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES                                               \
      "\n"                                                                                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,\n"                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},\n"              \
      "%32, %33, accumulate, 1, 1, %35, %36;\n"                                                         \
      "}\n"                                                                                             \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),       \
        "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),     \
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), \
        "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), \
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), \
        "+f"(sums[30]), "+f"(sums[31])                                                                  \
      : "l"(a), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B))
#define WGMMA_N80(TYPES)                                                                                \
  asm volatile(                                                                                         \
      "{\n"                                                                                             \
      ".reg .pred accumulate;\n"                                                                        \
      "setp.ne.b32 accumulate, %42, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n80k16.f32." TYPES                                               \
      "\n"                                                                                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,\n"                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,\n"               \
      "%32, %33, %34, %35, %36, %37, %38, %39},\n"                                                      \
      "%40, %41, accumulate, 1, 1, %43, %44;\n"                                                         \
      "}\n"                                                                                             \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),       \
        "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),     \
        "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), \
        "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), \
        "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), \
        "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]), "+f"(sums[35]), \
        "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39])                                  \
      : "l"(a), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B))
#define WGMMA_N128(TYPES)                                                                               \
  asm volatile(                                                                                         \
      "{\n"                                                                                             \
      ".reg .pred accumulate;\n"                                                                        \
      "setp.ne.b32 accumulate, %66, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPES                                              \
      "\n"                                                                                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,\n"                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,\n"               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,\n"               \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63},\n"              \
      "%64, %65, accumulate, 1, 1, %67, %68;\n"                                                         \
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
      : "l"(a), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B))
#define WGMMA_N192(TYPES)                                                                               \
  asm volatile(                                                                                         \
      "{\n"                                                                                             \
      ".reg .pred accumulate;\n"                                                                        \
      "setp.ne.b32 accumulate, %98, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPES                                              \
      "\n"                                                                                              \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,\n"                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,\n"               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,\n"               \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63,\n"               \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,\n"               \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95},\n"              \
      "%96, %97, accumulate, 1, 1, %99, %100;\n"                                                        \
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
        "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), "+f"(sums[64]), "+f"(sums[65]), \
        "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]), "+f"(sums[70]), "+f"(sums[71]), \
        "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]), "+f"(sums[75]), "+f"(sums[76]), "+f"(sums[77]), \
        "+f"(sums[78]), "+f"(sums[79]), "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]), \
        "+f"(sums[84]), "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]), "+f"(sums[88]), "+f"(sums[89]), \
        "+f"(sums[90]), "+f"(sums[91]), "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]), "+f"(sums[95])  \
      : "l"(a), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B))
#define WGMMA_N256(TYPES)                                                                                    \
  asm volatile(                                                                                              \
      "{\n"                                                                                                  \
      ".reg .pred accumulate;\n"                                                                             \
      "setp.ne.b32 accumulate, %130, 0;\n"                                                                   \
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
      "%128, %129, accumulate, 1, 1, %131, %132;\n"                                                          \
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
      : "l"(a), "l"(b), "r"(int{accumulate}), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B))
  if constexpr (N == 64) {
    if constexpr (std::is_same_v<T, __half>) {
      WGMMA_N64("f16.f16");
    } else {
      WGMMA_N64("bf16.bf16");
    }
  } else if constexpr (N == 80) {
    if constexpr (std::is_same_v<T, __half>) {
      WGMMA_N80("f16.f16");
    } else {
      WGMMA_N80("bf16.bf16");
    }
  } else if constexpr (N == 128) {
    if constexpr (std::is_same_v<T, __half>) {
      WGMMA_N128("f16.f16");
    } else {
      WGMMA_N128("bf16.bf16");
    }
  } else if constexpr (N == 192) {
    if constexpr (std::is_same_v<T, __half>) {
      WGMMA_N192("f16.f16");
    } else {
      WGMMA_N192("bf16.bf16");
    }
  } else {
    if constexpr (std::is_same_v<T, __half>) {
      WGMMA_N256("f16.f16");
    } else {
      WGMMA_N256("bf16.bf16");
    }
  }
#undef WGMMA_N64
#undef WGMMA_N80
#undef WGMMA_N128
#undef WGMMA_N192
#undef WGMMA_N256
}

// PTX ISA, "wgmma.mma_async", m64nNk8, and "Register Fragments for wgmma.mma_async.m64nNk8". The same for
// TF32 (fp32 whose lower 13 bits are ignored). a: [64, 8] in registers; b: [8, N], described by wgmma_tile
// and K-major, as TF32 requires. a[0], a[1] of thread t are column t % 4 of its rows r and r + 8, a[2], a[3]
// column t % 4 + 4 of both. These registers may not be written before the wgmma has ended.
template <int N>
__device__ inline void wgmma_m64k8_tf32(float (&sums)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                        bool accumulate) {
  static_assert(N == 32 || N == 64, "these are written out");
  if constexpr (N == 32) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32\n"
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15},\n"
        "{%16, %17, %18, %19}, %20, accumulate, 1, 1;\n"
        "}\n"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),
          "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
          "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32\n"
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,\n"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},\n"
        "{%32, %33, %34, %35}, %36, accumulate, 1, 1;\n"
        "}\n"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]),
          "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),
          "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]),
          "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]),
          "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]),
          "+f"(sums[30]), "+f"(sums[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}));
  }
}

// A compiler barrier on registers, without an instruction: the empty asm appears to write them. The compiler
// treats a wgmma as finished where it is issued. Called after a wait, this keeps readers of the sums from
// moving before the wait, and keeps the registers of a unchanged until then.
template <int N>
__device__ inline void wgmma_hold(float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int N>
__device__ inline void wgmma_hold(uint32_t (&a)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

#endif  // 9.0a
