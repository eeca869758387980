// Thin wrappers of the PTX that C++ has no word for, from compute capability 9.0 on. Each names its section
// of the PTX ISA by title, since the numbers move between versions. Pointers into shared memory are generic
// pointers.
#pragma once

#include <cstdint>

#include "common.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// PTX ISA, "mbarrier.init". One thread; `arrivals` complete a phase, the first of which has parity 0.
__device__ inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// PTX ISA, "membar / fence". Initialised barriers become visible to the async proxy and to the cluster.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX ISA, "membar / fence". What this thread wrote to shared memory becomes visible to bulk copies issued
// after it, by this thread or, past a barrier, by another one.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// PTX ISA, "mbarrier.arrive". Arrives, and keeps the phase open until `bytes` have been copied as well.
__device__ inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// PTX ISA, "mbarrier.test_wait / mbarrier.try_wait". Returns once the phase of that parity is complete; what
// its copies wrote is then visible to this thread.
__device__ inline void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t complete = 0;
  while (!complete) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n"
        "}"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// PTX ISA, "createpolicy". L2 gives these lines up first: for data that are used once.
__device__ inline uint64_t l2_evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// PTX ISA, "cp.async.bulk", global to shared memory. One thread; both addresses and `bytes` are multiples of
// 16. The bytes count towards the barrier's expected ones.
__device__ inline void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// PTX ISA, "cp.async.bulk", shared to global memory. One thread; both addresses and `bytes` are multiples of
// 16.
__device__ inline void bulk_store(void* global, const void* shared, uint32_t bytes, uint64_t policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes), "l"(policy)
               : "memory");
}

// PTX ISA, "cp.async.bulk.commit_group". This thread's stores since the last commit become one group.
__device__ inline void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// PTX ISA, "cp.async.bulk.wait_group". Waits until all but this thread's newest PENDING groups have read
// their source, which may then be overwritten.
template <int PENDING>
__device__ inline void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

#endif  // __CUDA_ARCH__ >= 900
