// Column sums of which groups of rows have each left a part in a workspace: the parts are added in a fixed
// order, so every run gives the same bits.
#pragma once

#include "lib/common.cuh"
#include "lib/ptx/hopper.cuh"

// The workspace: [groups, N] partial sums for dweight, then [groups, N] for dbias; a group leaves the sums
// over its rows.
__device__ inline float* partial_sums(float* workspace, int which, int groups, int64_t N, int group) {
  return workspace + (static_cast<int64_t>(which) * groups + group) * N;
}

constexpr int SUM_COLUMNS = 32, SUM_GROUPS = 8;  // of a block that adds partial sums: its lanes, its warps

// Adds all groups' partial sums, always in the same order: for dweight if blockIdx.y is 0, for dbias if it is
// 1.
template <typename T>
__device__ void add_partial_sums(const float* workspace, int groups, int64_t N, T* dweight, T* dbias) {
  __shared__ float sums[SUM_GROUPS][SUM_COLUMNS];
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32, which = blockIdx.y;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * SUM_COLUMNS + lane_id;
  const float* partial = workspace + which * groups * N + col;
  float sum = 0.0f;
  if (col < N) {
#pragma unroll 8
    for (int group = warp_id; group < groups; group += SUM_GROUPS) sum += partial[group * N];
  }
  sums[warp_id][lane_id] = sum;
  __syncthreads();  // for every warp's groups
  T* out = which == 0 ? dweight : dbias;
  if (warp_id > 0 || col >= N || out == nullptr) return;
  for (int warp = 1; warp < SUM_GROUPS; ++warp) sum += sums[warp][lane_id];
  out[col] = from_float<T>(sum);
}

constexpr int MOST_SUM_WARPS = 32, SUM_BATCH = 8;  // most warps of a block that adds sums; loads of a thread

// As add_partial_sums, but a thread has the loads of SUM_BATCH groups under way at once, and the kernel is
// set up while the one before it ends (launch_early).
template <typename T>
__device__ void add_partial_sums_at_once(const float* workspace, int groups, int64_t N, T* dweight,
                                         T* dbias) {
#if __CUDA_ARCH__ >= 900
  __shared__ float sums[MOST_SUM_WARPS][SUM_COLUMNS];
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32, warps = blockDim.x / 32;
  const int which = blockIdx.y;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * SUM_COLUMNS + lane_id;
  const int taken = col < N ? groups : 0;
  const float* partial = workspace + (which * groups + warp_id) * N + col;
  const int64_t step = warps * N;
  wait_for_previous_kernel();  // for the groups' sums
  float sum = 0.0f;
  for (int first = warp_id; first < taken; first += SUM_BATCH * warps, partial += SUM_BATCH * step) {
    float of_group[SUM_BATCH];
#pragma unroll
    for (int i = 0; i < SUM_BATCH; ++i) {
      of_group[i] = first + i * warps < taken ? partial[i * step] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < SUM_BATCH; ++i) sum += of_group[i];
  }
  sums[warp_id][lane_id] = sum;
  __syncthreads();  // for every warp's groups
  T* out = which == 0 ? dweight : dbias;
  if (warp_id > 0 || col >= N || out == nullptr) return;
  for (int warp = 1; warp < warps; ++warp) sum += sums[warp][lane_id];
  out[col] = from_float<T>(sum);
#endif
}

// Args has the gradients dweight and dbias, which may be null, of N elements each, and the memory and the
// stream.
template <typename Args>
bool wants_sums(const Args& args) {
  return args.dweight || args.dbias;
}

template <typename Args>
float* workspace_of(const Args& args, int groups, int outputs) {
  if (!wants_sums(args)) return nullptr;
  return static_cast<float*>(
      args.memory->workspace(static_cast<size_t>(outputs) * groups * args.N * sizeof(float)));
}

// Calls launch(workspace), which launches a step's kernel that leaves `groups` sets of partial sums; then
// launches sum_kernel, which adds them.
template <typename T, typename Args, typename Launch>
void launch_with_sums(const Args& args, int groups, bool centered, Launch launch,
                      void (*sum_kernel)(const float*, int, int64_t, T*, T*)) {
  const int outputs = centered ? 2 : 1;
  float* const workspace = workspace_of(args, groups, outputs);
  if (groups > 0) launch(workspace);
  if (!wants_sums(args)) return;
  const dim3 grid(static_cast<unsigned>(cdiv(args.N, SUM_COLUMNS)), outputs);
  sum_kernel<<<grid, SUM_COLUMNS * SUM_GROUPS, 0, args.stream>>>(
      workspace, groups, args.N, static_cast<T*>(args.dweight), static_cast<T*>(args.dbias));
}
