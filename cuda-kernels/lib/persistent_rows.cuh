// Persistent clusters over split rows: the columns of a block's part, the exchange of sums through DSMEM, and
// which rows a group takes. Terms: docs/glossary.md.
#pragma once

#include "lib/cluster.cuh"
#include "lib/packs.cuh"
#include "lib/ptx/hopper.cuh"

// The columns of a split row of N elements, in parts of `each` packs. Every part starts at a multiple of 16
// bytes but the first, which starts with the row, `skew` elements behind such a multiple.
template <typename T>
struct Parts {
  static constexpr int SIZE = Pack<T>::SIZE;
  int N, skew, each;

  __device__ int start(int part) const { return min(N, max(0, part * each * SIZE - skew)); }
  __device__ int count(int part) const { return start(part + 1) - start(part); }
};

// The exchange of sums between the blocks of a cluster, one row after the other. Rows alternate between two
// slots, which is enough: a block that sends for a row has received all sums of the row before it; every
// block sent those after it had read the sums of the row before that.
template <typename Sums>
struct Exchange {
  uint64_t complete[2];  // a phase completes when the sums of all blocks have arrived
  Sums sums[2][MOST_CLUSTER_BLOCKS];

  // All threads of all blocks call begin, and wait_for_all before the first exchange. Before compute
  // capability 9.0 there are no clusters, and nothing to do.
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

  // Sends `mine` to all blocks. In every warp, a lane below `blocks` gets the sums of the block with its
  // number. `row` counts exchanges from 0.
  __device__ Sums operator()(Sums mine, int rank, int blocks, uint32_t row) {
#if __CUDA_ARCH__ >= 900
    const int turn = row % 2, lane_id = threadIdx.x % 32;
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(&complete[turn], blocks * sizeof(Sums));
    if (threadIdx.x < blocks) store_async(&sums[turn][rank], mine, &complete[turn], threadIdx.x);
    mbarrier_wait_parity_cluster(&complete[turn], row / 2 % 2);  // for the sums of all blocks
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

// How many groups, clusters or blocks, share M rows when `resident` groups run at once. Groups of several
// rows are a multiple of `period`, so that the rows of each have the same skew; 0 if too few groups run for
// that.
inline int groups_for(int64_t M, int resident, int period) {
  if (M <= resident) return static_cast<int>(M);  // a row each
  return resident / period * period;
}

// Shares of M rows by skew. Rows that lie a multiple of `period` apart have the same skew: they are of one
// kind. With several kinds, rows are ordered by kind, and clusters get equal shares of that order, so that
// most have rows of one kind. With one kind, a cluster takes every row whose index is its own modulo the
// number of clusters.
struct RowKinds {
  int64_t M;
  int period;

  __device__ int64_t start(int kind) const { return kind * (M / period) + min(int64_t{kind}, M % period); }
  __device__ int kind(int64_t place) const {
    const int64_t few = M / period, more = M % period;  // the first `more` kinds have a row more
    if (place < start(more)) return static_cast<int>(place / (few + 1));
    return few ? static_cast<int>(min(more + (place - start(more)) / few, int64_t{period - 1})) : period - 1;
  }
};

// Whether the 16 bytes in which row `index` of M ends may reach behind a matrix with one of these strides.
template <typename T, typename... Strides>
__device__ bool is_at_end(int64_t M, int64_t index, Strides... strides) {
  return (((M - 1 - index) * strides < Pack<T>::SIZE) || ...);
}
