// How persistent clusters draw rows from a counter: for norm_ahead.cuh. Terms: docs/glossary.md.
#pragma once

#include "lib/common.cuh"

// In place of a row's index: this turn has no row, and the next row may have another skew.
constexpr int64_t PAUSE = -1;

// Which rows a cluster takes. SMs are not equally fast: with fixed shares the slowest one would finish last,
// and rows far from each other would be under way. So a cluster starts with as many rows as it has stages,
// and draws each further one from a counter when a stage is about to be free.
//
// Rows that lie a multiple of `period` apart have the same skew: they are of one kind. A cluster starts with
// rows of one kind and draws rows of that kind; when these are used up, it goes on with another kind.
struct Draws {
  // [period + 1]: how many rows of each kind were drawn, then how many clusters have finished. All 0 before
  // and after the launch.
  unsigned* drawn;
  int64_t M;
  int period, clusters, stages;

  __device__ int64_t row(int64_t which, int kind) const { return which * period + kind; }
  // How many clusters start with the kind.
  __device__ int beginners(int kind) const { return (clusters - kind + period - 1) / period; }
  // The row with which a cluster starts in this turn; PAUSE, or M or more, if its kind has no such row.
  __device__ int64_t given(int cluster, int turn) const {
    const int kind = cluster % period;
    const int64_t index = row(cluster / period + int64_t{turn} * beginners(kind), kind);
    // Rows of other kinds may be left, unless there is one kind or every row starts a cluster.
    return index < M || period == 1 || clusters == M ? index : PAUSE;
  }
  // Draws the cluster's next row. Returns its index, or PAUSE with another `kind`, or at least M if no rows
  // are left. A whole warp calls it.
  __device__ int64_t draw(int cluster, int& kind) const {
    const int lane_id = threadIdx.x % 32;
    unsigned before = 0;
    if (lane_id == 0) before = atomicAdd(&drawn[kind], 1u);
    const int64_t index = row(int64_t{stages} * beginners(kind) + __shfl_sync(~0u, before, 0), kind);
    if (index < M) return index;
    int left = 0;
    if (lane_id < period) {
      const int64_t taken = int64_t{stages} * beginners(lane_id) + __ldcg(&drawn[lane_id]);
      left = static_cast<int>(
          max(min((M - lane_id + period - 1) / period - taken, int64_t{1} << 24), int64_t{0}));
    }
    // Clusters that come here together spread over the kinds with many rows left.
    const int most = __reduce_max_sync(~0u, left);
    if (most == 0) return M;
    const unsigned kinds = __ballot_sync(~0u, left > most / 2);
    kind = __fns(kinds, 0, cluster / period % __popc(kinds) + 1);
    return PAUSE;
  }
  __device__ void end() const {
    if (atomicAdd(&drawn[period], 1u) + 1 < clusters) return;
    for (int i = 0; i <= period; ++i) drawn[i] = 0;
  }
};
