// Thin wrappers of PTX instructions that C++ has no expression for, from compute capability 8.0 on. Each
// names its section of the PTX ISA by title, since section numbers change between versions. Pointers to
// shared memory are generic pointers.
#pragma once

#include <type_traits>

#include "lib/common.cuh"

// The caches that a copy of cp.async fills on its way.
enum class Caches { L1_AND_L2, L2 };

// PTX ISA, "cp.async". Starts an asynchronous copy of BYTES (4, 8 or 16; both addresses are multiples of it)
// from global to shared memory. If `valid` is false, it reads nothing, whatever the address, and writes
// zeros. Fewer than 16 bytes cannot bypass L1.
template <int BYTES, Caches CACHES = BYTES == 16 ? Caches::L2 : Caches::L1_AND_L2>
__device__ inline void cp_async(void* shared, const void* global, bool valid) {
  const uint32_t source_bytes = valid ? BYTES : 0;
  if constexpr (CACHES == Caches::L2) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "n"(BYTES), "r"(source_bytes)
                 : "memory");
  }
}

// PTX ISA, "cp.async.commit_group". This thread's copies since the last commit become one group.
__device__ inline void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// PTX ISA, "cp.async.wait_group". Waits until all but this thread's newest PENDING groups have landed. A
// barrier makes them visible to the other threads.
template <int PENDING>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// PTX ISA, "ldmatrix". The warp loads four 8 x 8 matrices of 16-bit elements; lane 8 i + j holds the address
// of row j of matrix i, a multiple of 16 bytes. Lane l receives elements 2 (l % 4) and the next of row l / 4
// of matrix i in fragment[i].
__device__ inline void ldmatrix_x4(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, with each matrix transposed.
__device__ inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(row))
               : "memory");
}

// PTX ISA, "mma.sync", m16n8k16. sums += a @ b for bf16 or fp16 (T), summed in fp32. With g = lane / 4 and
// t = lane % 4: a holds rows g, g + 8 of columns 2t, 2t + 1, then the same of columns 2t + 8, 2t + 9; b holds
// rows 2t, 2t + 1, then 2t + 8, 2t + 9 of column g; sums hold columns 2t, 2t + 1 of row g, then of row g + 8.
template <typename T>
__device__ inline void mma_m16n8k16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<T, __half>, "T is __nv_bfloat16 or __half");
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// PTX ISA, "cvt". Rounds to the nearest TF32: one instruction from 9.0 on, three before.
__device__ inline uint32_t to_tf32(float x) {
  uint32_t bits;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return bits;
}

// PTX ISA, "mma.sync", m16n8k8. sums += a @ b for TF32 (fp32 whose lower 13 bits are ignored), summed in
// fp32. With g = lane / 4 and t = lane % 4: a holds rows g, g + 8 of column t, then of column t + 4; b holds
// rows t, t + 4 of column g; sums hold columns 2t, 2t + 1 of row g, then of row g + 8.
__device__ inline void mma_m16n8k8_tf32(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
