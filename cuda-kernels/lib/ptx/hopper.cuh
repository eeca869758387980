// Thin wrappers of PTX instructions that C++ has no expression for, from compute capability 9.0 on. Each
// names its section of the PTX ISA by title, since section numbers change between versions. Pointers to
// shared memory are generic pointers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "lib/common.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// PTX ISA, "mbarrier.init". One thread. A phase completes after `arrivals` arrivals; the first has parity 0.
__device__ inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// PTX ISA, "membar / fence". Makes initialised mbarriers visible to the async proxy and to the cluster.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX ISA, "membar / fence". Makes this thread's writes to shared memory visible to bulk copies that are
// issued later, by this thread or, after a barrier, by another one.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// PTX ISA, "mbarrier.arrive". Arrives, and adds `bytes` to what copies must bring before the phase completes.
__device__ inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// PTX ISA, "mbarrier.test_wait / mbarrier.try_wait". Waits until the phase of that parity is complete; the
// bytes of its copies are then visible to this thread.
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

// The same for data that other blocks of the cluster sent by st.async: these are then visible to this thread,
// too.
__device__ inline void mbarrier_wait_parity_cluster(uint64_t* barrier, uint32_t parity) {
  uint32_t complete = 0;
  while (!complete) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n"
        "}"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// The same, but acquires only shared memory that the cluster wrote, so L1 is not invalidated. PTX ISA,
// "membar / fence".
__device__ inline void mbarrier_wait_parity_shared(uint64_t* barrier, uint32_t parity) {
  uint32_t complete = 0;
  while (!complete) {
    asm volatile(
        "{\n"
        ".reg .pred complete;\n"
        "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete;\n"
        "}"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
  asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
}

// PTX ISA, "mbarrier.arrive".
__device__ inline void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// PTX ISA, "mapa" and "mbarrier.arrive". Arrives at another block's mbarrier: the one at the same offset in
// the shared memory of the cluster's block `block`.
__device__ inline void mbarrier_arrive_in(uint64_t* barrier, uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(block)
      : "memory");
}

// PTX ISA, "atom". Counts calls in shared memory, and returns true in the last of `calls`; then the count
// starts again. Acquire-release: what the other callers read and wrote before happens before whatever follows
// the last call.
__device__ inline bool is_last_of(uint32_t* counter, uint32_t calls) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(shared_address(counter)), "r"(calls - 1)
               : "memory");
  return before == calls - 1;
}

// PTX ISA, "%cluster_ctarank". This block's rank in its cluster.
__device__ inline uint32_t cluster_block() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// PTX ISA, "barrier.cluster". Barrier of all threads of all blocks of the cluster; their earlier writes are
// then visible.
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// PTX ISA, "barrier.cluster", split: what a thread wrote before its arrival is visible to every thread that
// has waited. All threads of all blocks of the cluster must do both.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The arrival without release, for kernels in which only initialised mbarriers, already behind their fence,
// must be visible. A release would wait for all of the thread's outstanding memory accesses.
__device__ inline void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// PTX ISA, "mapa" and "st.async". Stores `value`, of 4 or 8 bytes, to the same offset in the shared memory of
// another block of the cluster. Its bytes count towards those that the mbarrier there expects.
template <typename T>
__device__ void store_async(T* place, T value, uint64_t* barrier, uint32_t block) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint32_t there, barrier_there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(block));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(barrier_there)
               : "r"(shared_address(barrier)), "r"(block));
  if constexpr (sizeof(T) == 8) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(there),
                 "l"(bits), "r"(barrier_there)
                 : "memory");
  } else {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
                 "r"(bits), "r"(barrier_there)
                 : "memory");
  }
}

// PTX ISA, "bar.sync". Named barrier `id`, 1 to 15, of `threads` threads in whole warps; 0 is __syncthreads'.
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// PTX ISA, "bar.arrive". Counts as one of the barrier's `threads` without a wait for the others.
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// PTX ISA, "setmaxnreg". The warpgroup releases registers, or waits for free ones, until each thread has
// COUNT.
template <int COUNT>
__device__ inline void give_back_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// PTX ISA, "griddepcontrol". From here on, dependent kernels (programmatic dependent launch) may start where
// there is room. Until its own wait, such a kernel must not touch anything that any earlier kernel writes,
// since this kernel may not have waited for its predecessors yet.
__device__ inline void allow_dependent_launch() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// PTX ISA, "griddepcontrol". Waits until all earlier kernels have ended and their writes are visible.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// PTX ISA, "createpolicy". Evict-first: L2 replaces these lines before others. For data that are used once.
__device__ inline uint64_t l2_evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// PTX ISA, "cp.async.bulk", global to shared memory. Called by one thread; both addresses and `bytes` are
// multiples of 16. The bytes count towards those that the mbarrier expects.
__device__ inline void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// The same with L2's default eviction policy.
__device__ inline void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// PTX ISA, "cp.async.bulk", shared to global memory. Called by one thread; both addresses and `bytes` are
// multiples of 16.
__device__ inline void bulk_store(void* global, const void* shared, uint32_t bytes, uint64_t policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes), "l"(policy)
               : "memory");
}

// PTX ISA, "prefetch / prefetchu". Prefetches a tensor map.
__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// PTX ISA, "cp.async.bulk.tensor". Called by one thread; copies the map's box at column x, row y to shared
// memory, with zeros for elements outside the matrix. The whole box's bytes count towards those that the
// mbarrier expects.
__device__ inline void tma_load(void* shared, const CUtensorMap* map, int x, int y, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

// The same for a map of four dimensions: the box at x, y, z, w, from the fastest dimension to the slowest.
__device__ inline void tma_load(void* shared, const CUtensorMap* map, int x, int y, int z, int w,
                                uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// tma_load of two dimensions as a multicast: to the same offset in every block of the cluster whose bit is
// set in `blocks`, and to the mbarrier there.
__device__ inline void tma_load_multicast(void* shared, const CUtensorMap* map, int x, int y,
                                          uint64_t* barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

// PTX ISA, "cp.async.bulk.tensor". Called by one thread; copies shared memory to the map's box at column x,
// row y, without the elements outside the matrix.
__device__ inline void tma_store(const CUtensorMap* map, const void* shared, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(shared)), "r"(x), "r"(y)
               : "memory");
}

// PTX ISA, "stmatrix". The warp stores four 8 x 8 matrices of 16-bit elements. Lane 8 i + j passes the
// address of row j of matrix i, a multiple of 16 bytes; fragment[i] of lane l holds elements 2 (l % 4) and
// the next of row l / 4 of matrix i.
__device__ inline void stmatrix_x4(void* row, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
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
