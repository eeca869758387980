// The first kernel of matmul_tf32x3's v05: copies operands to rows that are contiguous along K, split into
// big and small parts or as they are.
#pragma once

#include "lib/ptx/ampere.cuh"

constexpr int SPLIT_TILE = 64;
constexpr int SPLIT_THREADS = 256;

// x = big + small but for its last bit. The subtraction is exact, and leaves at most 13 bits.
__device__ inline void split(uint32_t x, uint32_t& big, uint32_t& small) {
  big = to_tf32(__uint_as_float(x));
  small = __float_as_uint(__uint_as_float(x) - __uint_as_float(big));
}

// An operand to copy to rows that are contiguous along K, split or as it is.
struct SplitJob {
  const float* from;  // [lines, K]
  float* to;          // [lines, pitch]; if split, for big, followed by as much for small
  int64_t lines, K;
  int64_t stride, stride_k;
  int64_t pitch;  // a multiple of 4
  bool split;
};

struct SplitJobs {
  SplitJob job[2];  // a job without lines does nothing
};

// The blocks that the jobs take.
inline int64_t split_tiles(const SplitJobs& jobs) {
  int64_t tiles = 0;
  for (const SplitJob& job : jobs.job) tiles += cdiv(job.lines, SPLIT_TILE) * cdiv(job.K, SPLIT_TILE);
  return tiles;
}

// A block copies one tile; the first job's come first.
__device__ inline void split_tile(const SplitJobs& jobs) {
  __shared__ float tile[SPLIT_TILE][SPLIT_TILE + 1];  // [lines, K]; padded, as it is filled either way

  int64_t index = blockIdx.x;
  const int64_t tiles_of_first = cdiv(jobs.job[0].lines, SPLIT_TILE) * cdiv(jobs.job[0].K, SPLIT_TILE);
  const bool second = index >= tiles_of_first;
  if (second) index -= tiles_of_first;
  const SplitJob& job = second ? jobs.job[1] : jobs.job[0];
  const int64_t tiles_k = cdiv(job.K, SPLIT_TILE);
  const int64_t first_line = index / tiles_k * SPLIT_TILE;
  const int64_t first_k = index % tiles_k * SPLIT_TILE;
  const int lines = min(job.lines - first_line, int64_t{SPLIT_TILE});
  const int depth = min(job.K - first_k, int64_t{SPLIT_TILE});

  // A warp reads along the smaller stride.
  constexpr int WARPS = SPLIT_THREADS / 32;
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const bool along_k = job.stride_k <= job.stride;
  const float* from = job.from + first_line * job.stride + first_k * job.stride_k;
  float loaded[SPLIT_TILE / WARPS][SPLIT_TILE / 32];
#pragma unroll
  for (int i = 0; i < SPLIT_TILE / WARPS; ++i) {
#pragma unroll
    for (int j = 0; j < SPLIT_TILE / 32; ++j) {
      const int line = along_k ? i * WARPS + warp_id : j * 32 + lane_id;
      const int k = along_k ? j * 32 + lane_id : i * WARPS + warp_id;
      loaded[i][j] = line < lines && k < depth ? __ldcs(from + line * job.stride + k * job.stride_k) : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < SPLIT_TILE / WARPS; ++i) {
#pragma unroll
    for (int j = 0; j < SPLIT_TILE / 32; ++j) {
      const int line = along_k ? i * WARPS + warp_id : j * 32 + lane_id;
      const int k = along_k ? j * 32 + lane_id : i * WARPS + warp_id;
      tile[line][k] = loaded[i][j];
    }
  }
  __syncthreads();  // for the tile

  const int k = threadIdx.x % (SPLIT_TILE / 4) * 4;
  for (int line = threadIdx.x / (SPLIT_TILE / 4); line < lines; line += SPLIT_THREADS / (SPLIT_TILE / 4)) {
    if (k >= depth) break;  // a row's last vector of four is filled up with zeros
    uint32_t x[4], big[4], small[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = __float_as_uint(tile[line][k + i]);
      split(x[i], big[i], small[i]);
      small[i] = to_tf32(__uint_as_float(small[i]));  // its last bit, which wgmma would drop, is rounded
      if (!job.split) big[i] = x[i];
    }
    float* to = job.to + (first_line + line) * job.pitch + first_k + k;
    *reinterpret_cast<uint4*>(to) = make_uint4(big[0], big[1], big[2], big[3]);
    if (!job.split) continue;
    to += job.lines * job.pitch;
    *reinterpret_cast<uint4*>(to) = make_uint4(small[0], small[1], small[2], small[3]);
  }
}
