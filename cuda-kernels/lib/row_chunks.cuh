// Which rows and columns of a matrix a thread has where columns are summed, too, and the sums of the partial
// sums that this makes. Terms: docs/glossary.md.
#pragma once

#include "packs.cuh"

// Which rows a thread takes. A row has `strips` strips of `lanes` threads side by side; a block takes
// `groups` rows of a strip at once. A chunk is the set of rows behind one partial sum. All rows of a chunk
// have the same skew, so that a thread's packs have the same columns in each; the next chunk has another
// skew, and after `period` chunks the skews repeat.
struct RowLayout {
  int lanes, groups, strips, period, chunks;
  int turns;      // rows of a thread; some threads have one fewer
  uint32_t zero;  // 0, unknown to the compiler: see add_nothing

  __device__ int64_t first_row(int chunk, int group) const {
    return chunk % period + static_cast<int64_t>(period) * (chunk / period * groups + group);
  }
};

// A chunk for every block that runs at once, and as many rows for every thread. A block has THREADS threads
// at most. `wide`: whether packs are aligned.
template <typename T, int THREADS, int BLOCKS_PER_SM>
RowLayout row_layout(int64_t M, int64_t N, bool wide) {
  RowLayout layout = {.period = wide && M > 1 ? skew_period<T>(N) : 1};
  const int64_t packs = layout.period > 1 ? most_packs<T>(N) : cdiv(N, Pack<T>::SIZE);
  layout.strips = static_cast<int>(cdiv(packs, THREADS));
  layout.lanes = static_cast<int>(cdiv(packs, layout.strips));
  layout.groups = THREADS / layout.lanes;
  const int64_t warps = cdiv(layout.lanes * layout.groups, 32);
  const int64_t resident = multiprocessor_count() * (BLOCKS_PER_SM * THREADS / 32 / warps);
  const int64_t most = std::max<int64_t>(1, resident / layout.strips / layout.period) * layout.period;
  layout.turns = static_cast<int>(std::max<int64_t>(1, cdiv(M, most * layout.groups)));
  const int64_t kinds = cdiv(M, layout.turns * layout.groups * layout.period);
  layout.chunks = static_cast<int>(std::max<int64_t>(1, kinds) * layout.period);
  return layout;
}

// Adds the totals of a block's groups, in order. totals: [groups, width], of the columns from `first` on,
// which may lie outside of the row; sums: [N].
__device__ inline void add_groups(const float* totals, const RowLayout& layout, int width, int64_t first,
                                  int64_t N, float* sums) {
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    if (first + i < 0 || first + i >= N) continue;
    float total = 0.0f;
    for (int group = 0; group < layout.groups; ++group) total += totals[group * width + i];
    sums[first + i] = total;
  }
}

constexpr int CHUNK_WARPS = 32;  // of a block that adds the partial sums of 32 columns

// Adds the partial sums of all chunks, always in the same order. partials: [chunks, N]; out: [N].
template <typename T>
__device__ void add_chunks(const float* partials, int chunks, int64_t N, T* out) {
  __shared__ float sums[CHUNK_WARPS][33];  // 33: rows and columns have no bank conflicts
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32, col = first + lane_id;
  float sum = 0.0f;
  if (col < N) {
#pragma unroll 4
    for (int chunk = warp_id; chunk < chunks; chunk += CHUNK_WARPS) sum += partials[chunk * N + col];
  }
  sums[warp_id][lane_id] = sum;
  __syncthreads();  // for every warp's chunks
  const float total = lanes_sum(sums[lane_id][warp_id]);
  if (lane_id == 0 && first + warp_id < N) out[first + warp_id] = from_float<T>(total);
}
