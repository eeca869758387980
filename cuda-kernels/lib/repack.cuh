// Repacks matrices for the TMA, which needs contiguous rows whose pitch and address are multiples of 16
// bytes. For operands that lack either, or have any other strides.
#pragma once

#include "common.cuh"
#include "lib/ptx/hopper.cuh"

// One matrix [rows, cols]; strides and pitch count elements.
struct RepackJob {
  const void* from;
  void* to;  // [rows, pitch], aligned to 16 bytes as is pitch
  int64_t rows, cols;
  int64_t stride_row, stride_col;
  int64_t pitch;
};

struct RepackJobs {
  RepackJob job[2];  // rows == 0: unused
};

namespace repack {

constexpr int THREADS = 256;
constexpr int BLOCKS_PER_SM = 4;
constexpr int VECTORS = 4;  // a lane, all in flight at once

// Elements of one span, which a warp copies.
template <typename T>
constexpr int SPAN = 32 * VECTORS * Pack<T>::SIZE;

// Bytes [shift, shift + 16) of two neighbouring vectors, as one vector. Shifts by two words, one word, then
// bytes, so that no register is indexed by a run-time number (which would spill to local memory).
__device__ inline uint4 shifted(uint4 low, uint4 high, int shift) {
  uint32_t words[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = __funnelshift_r(words[i], words[i + 1], shift % 4 * 8);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) kernel(const __grid_constant__ RepackJobs jobs) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  // Programmatic dependent launch: a matmul that waits for this kernel may be set up once all blocks have
  // begun. This kernel waits for nothing, since it is launched without that attribute.
  allow_dependent_launch();
#endif
  // Each warp copies one span of one row; the first matrix's spans come first. Their number fits 32 bits,
  // since 2^32 spans exceed a GPU's memory.
  uint32_t span = blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  const uint32_t spans_of_first = jobs.job[0].rows * cdiv(jobs.job[0].cols, SPAN<T>);
  const bool second = span >= spans_of_first;
  if (second) span -= spans_of_first;
  const RepackJob job = second ? jobs.job[1] : jobs.job[0];
  const uint32_t spans_of_row = cdiv(job.cols, SPAN<T>);
  if (spans_of_row == 0 || span >= job.rows * spans_of_row) return;
  const int64_t row = span / spans_of_row;
  const int64_t col = int64_t{span % spans_of_row} * SPAN<T>;
  const int cols = min(job.cols - col, int64_t{SPAN<T>});
  const T* from = static_cast<const T*>(job.from) + row * job.stride_row + col * job.stride_col;
  T* to = static_cast<T*>(job.to) + row * job.pitch + col;
  const int lane_id = threadIdx.x % 32;

  if (job.stride_col != 1) {
    for (int i = lane_id; i < cols; i += 32) to[i] = from[i * job.stride_col];
    return;
  }
  // Each lane loads aligned vectors and builds its own output vector from two neighbours. Every loaded vector
  // holds an element of the row, so the loads stay within the matrix's own 16-byte vectors.
  const int shift = reinterpret_cast<uintptr_t>(from) % 16;
  const uint4* vectors = reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(from) - shift);
  const int bytes = shift + cols * static_cast<int>(sizeof(T));
  const auto load = [&](int i) { return i * 16 < bytes ? __ldcs(vectors + i) : make_uint4(0, 0, 0, 0); };
  uint4 loaded[VECTORS + 1];
#pragma unroll
  for (int u = 0; u < VECTORS; ++u) loaded[u] = load(u * 32 + lane_id);
  loaded[VECTORS] = lane_id == 0 ? load(VECTORS * 32) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int u = 0; u < VECTORS; ++u) {
    // The neighbour's vector is held by the next lane; the last lane's neighbour by lane 0, in its next
    // round.
    const uint4 offered = lane_id == 0 ? loaded[u + 1] : loaded[u];
    const int from_lane = (lane_id + 1) % 32;
    const uint4 next = make_uint4(
        __shfl_sync(0xffffffff, offered.x, from_lane), __shfl_sync(0xffffffff, offered.y, from_lane),
        __shfl_sync(0xffffffff, offered.z, from_lane), __shfl_sync(0xffffffff, offered.w, from_lane));
    const int i = (u * 32 + lane_id) * Pack<T>::SIZE;
    if (i < cols) *reinterpret_cast<uint4*>(to + i) = shifted(loaded[u], next, shift);
  }
}

}  // namespace repack

// Copies one or two matrices of T in one launch.
template <typename T>
void launch_repack(const RepackJobs& jobs, cudaStream_t stream) {
  int64_t spans = 0;
  for (const RepackJob& job : jobs.job) spans += job.rows * cdiv(job.cols, repack::SPAN<T>);
  if (spans == 0) return;
  repack::kernel<T><<<cdiv(spans, repack::THREADS / 32), repack::THREADS, 0, stream>>>(jobs);
  CUDA_CHECK(cudaGetLastError());
}
