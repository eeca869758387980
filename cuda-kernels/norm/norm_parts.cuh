// Clusters of blocks that take row after row, each block a part of its columns: what the norms' last steps
// share, forward and backward.
#pragma once

#include "lib/cluster.cuh"
#include "lib/packs.cuh"
#include "lib/ptx/hopper.cuh"

// The columns of a row of N elements, in parts of `each` packs. Parts begin at multiples of 16 bytes of
// memory, but for the first, which begins `skew` elements behind one.
template <typename T>
struct Parts {
  static constexpr int SIZE = Pack<T>::SIZE;
  int N, skew, each;

  __device__ int start(int part) const { return min(N, max(0, part * each * SIZE - skew)); }
  __device__ int count(int part) const { return start(part + 1) - start(part); }
};

// Sums that the blocks of a cluster send each other, row by row. Rows take turns with two places: a block
// that sends for a row has all sums of the row before, and so every block has read those of the row before
// that.
template <typename Sums>
struct Exchange {
  uint64_t complete[2];  // a phase completes when every block's sums are there
  Sums sums[2][MOST_CLUSTER_BLOCKS];

  // All threads of all blocks call it, and wait before the first exchange. There is none before 9.0.
  __device__ void begin() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : complete) mbarrier_init(&barrier, 1);
      fence_mbarrier_init();
    }
    cluster_arrive();
#endif
  }
  __device__ void wait_for_all() {
#if __CUDA_ARCH__ >= 900
    cluster_wait();  // for all blocks to run, with their barriers initialised
#endif
  }

  // The sums of block lane_id, in every warp, for lanes below `blocks`; row is the how-many-th exchange this
  // is.
  __device__ Sums operator()(Sums mine, int rank, int blocks, uint32_t row) {
#if __CUDA_ARCH__ >= 900
    const int turn = row % 2, lane_id = threadIdx.x % 32;
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(&complete[turn], blocks * sizeof(Sums));
    if (threadIdx.x < blocks) store_async(&sums[turn][rank], mine, &complete[turn], threadIdx.x);
    mbarrier_wait_parity_cluster(&complete[turn], row / 2 % 2);
    return lane_id < blocks ? sums[turn][lane_id] : Sums{};
#else
    return mine;
#endif
  }
};

// This block's number in its cluster.
__device__ inline int rank_in_cluster(int blocks) {
#if __CUDA_ARCH__ >= 900
  return blocks > 1 ? static_cast<int>(cluster_block()) : 0;
#else
  return 0;
#endif
}

// After how many rows one is skewed as the first, if they lie that many elements apart: a power of two, at
// most as many as elements fit BYTES.
template <typename T, int BYTES = 16, typename... Strides>
int skew_period(Strides... strides) {
  int period = 1;
  while (((strides * period % (BYTES / static_cast<int>(sizeof(T))) != 0) || ...)) period *= 2;
  return period;
}

// How many groups take M rows, if `resident` run at once and each one's rows lie a multiple of `period`
// apart; 0 where too few run.
inline int groups_for(int64_t M, int resident, int period) {
  if (M <= resident) return static_cast<int>(M);  // a row each
  return resident / period * period;
}
