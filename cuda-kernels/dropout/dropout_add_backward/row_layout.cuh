// Which rows and columns of dx a thread has where columns are summed, too: for v04 and v05. Terms:
// docs/glossary.md.
#pragma once

#include "args.h"
#include "lib/packs.cuh"

constexpr int THREADS = 256;   // of a block, at most
constexpr int SUM_BLOCKS = 3;  // of an SM

// Which rows a thread takes, if columns are summed. A row has `strips` strips of `lanes` threads side by
// side; a block takes `groups` rows of a strip at once. A chunk is the set of rows behind one partial sum.
// All rows of a chunk have the same skew, so that a thread's packs have the same columns in each; the next
// chunk has another skew, and after `period` chunks the skews repeat.
struct RowLayout {
  int lanes, groups, strips, period, chunks;
  int turns;      // rows of a thread; some threads have one fewer
  uint32_t zero;  // 0, unknown to the compiler: see add_nothing

  __device__ int64_t first_row(int chunk, int group) const {
    return chunk % period + static_cast<int64_t>(period) * (chunk / period * groups + group);
  }
};

// Whether dout and x have the skew of dx in every row, so that a pack of one is a pack of all.
template <typename T>
bool are_skewed_alike(const DropoutAddBackwardArgs& args) {
  const auto like_dx = [&](int64_t stride) { return args.M == 1 || (stride - args.N) % Pack<T>::SIZE == 0; };
  return aligned_to_16_bytes(args.dout, args.x, args.dx) && like_dx(args.stride_dm) &&
         (args.x == nullptr || like_dx(args.stride_xm));
}

// A chunk for every block that runs at once, and as many rows for every thread. `wide`: whether packs of dx
// are aligned.
template <typename T>
RowLayout row_layout(int64_t M, int64_t N, bool wide) {
  RowLayout layout = {.period = wide && M > 1 ? skew_period<T>(N) : 1};
  const int64_t packs = layout.period > 1 ? most_packs<T>(N) : cdiv(N, Pack<T>::SIZE);
  layout.strips = static_cast<int>(cdiv(packs, THREADS));
  layout.lanes = static_cast<int>(cdiv(packs, layout.strips));
  layout.groups = THREADS / layout.lanes;
  const int64_t warps = cdiv(layout.lanes * layout.groups, 32);
  const int64_t resident = multiprocessor_count() * (SUM_BLOCKS * THREADS / 32 / warps);
  const int64_t most = std::max<int64_t>(1, resident / layout.strips / layout.period) * layout.period;
  layout.turns = static_cast<int>(std::max<int64_t>(1, cdiv(M, most * layout.groups)));
  const int64_t kinds = cdiv(M, layout.turns * layout.groups * layout.period);
  layout.chunks = static_cast<int>(std::max<int64_t>(1, kinds) * layout.period);
  return layout;
}

constexpr int SUM_WARPS = 32;

// dbias: adds the partial sums of all chunks, always in the same order. A block takes 32 columns.
template <typename T>
__device__ void add_chunks(const float* partials, int chunks, int64_t N, T* dbias) {
  __shared__ float sums[SUM_WARPS][33];  // 33: rows and columns have no bank conflicts
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * 32, col = first + lane_id;
  float sum = 0.0f;
  if (col < N) {
#pragma unroll 4
    for (int chunk = warp_id; chunk < chunks; chunk += SUM_WARPS) sum += partials[chunk * N + col];
  }
  sums[warp_id][lane_id] = sum;
  __syncthreads();  // for every warp's chunks
  const float total = lanes_sum(sums[lane_id][warp_id]);
  if (lane_id == 0 && first + warp_id < N) dbias[first + warp_id] = from_float<T>(total);
}
