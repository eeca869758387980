// Reductions into global memory. Compute capability 9.0.
#pragma once

#include <cstdint>

#include "lib/common.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// PTX ISA, "cp.reduce.async.bulk". Called by one thread; adds fp32 numbers of shared memory to global ones.
// Both addresses and `bytes` are multiples of 16. Counts as a store for bulk_commit_group.
__device__ inline void bulk_reduce_add(float* global, const float* shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// PTX ISA, "red". Adds four fp32 numbers to global ones, whose address is a multiple of 16; returns nothing.
__device__ inline void reduce_add(float4* global, float4 value) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
}

#endif  // 9.0
