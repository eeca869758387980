// The mean or sum of the rows' losses, always added in the same order, so runs agree bit by bit.
//
// Each block adds a share of the rows. If there are several blocks, the one that takes the last ticket adds
// their sums, as in reduction's v07. The mean of no rows is NaN, as in PyTorch. From compute capability 9.0
// on a single block is set up while the losses are computed.
#include <algorithm>
#include <map>

#include "lib/early.cuh"
#include "lib/ptx/hopper.cuh"
#include "mean.h"

namespace {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int BATCH = 8;  // rows of a thread that are loaded at once
constexpr int64_t ROWS_PER_BLOCK = BATCH * THREADS;
constexpr int64_t MOST_BLOCKS = THREADS;  // a thread of the last block has one block's sum

struct Part {
  double sum = 0.0;
  long long count = 0;

  __device__ void operator+=(Part other) {
    sum += other.sum;
    count += other.count;
  }
};

// Sums over all threads of the block; thread 0 gets the result. `parts`: WARPS elements of shared memory that
// no thread still reads.
__device__ Part block_sum(Part part, Part* parts) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    part +=
        {__shfl_xor_sync(0xffffffff, part.sum, distance), __shfl_xor_sync(0xffffffff, part.count, distance)};
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
  __syncthreads();  // waits for every warp's part
  Part sum;
  for (int warp_id = 0; warp_id < WARPS; ++warp_id) sum += parts[warp_id];
  return sum;
}

// losses, target: [M]; loss, scale: one number; written: [blocks], the blocks' sums; counter: 0 before and
// after.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    cross_entropy_mean_kernel(const float* losses, const int64_t* target, T* loss, float* scale, int64_t M,
                              int64_t ignore_index, bool mean, Part* written, unsigned* counter) {
  __shared__ Part parts[2][WARPS];
  __shared__ bool is_last;
#if __CUDA_ARCH__ >= 900
  wait_for_previous_kernel();  // for the losses
#endif
  Part part;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS;
  int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  for (; first < M; first += BATCH * stride) {
    float some[BATCH];
    int64_t classes[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int64_t row = first + i * stride;
      some[i] = row < M ? losses[row] : 0.0f;
      classes[i] = row < M ? target[row] : ignore_index;
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) part += {some[i], classes[i] != ignore_index};
  }
  part = block_sum(part, parts[0]);

  if (gridDim.x > 1) {
    if (threadIdx.x == 0) {
      written[blockIdx.x] = part;
      __threadfence();  // release: the sum is visible before the ticket
      is_last = atomicInc(counter, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();  // waits for the ticket
    if (!is_last) return;
    __threadfence();  // acquire: sums written before earlier tickets are visible
    part = {};
    if (threadIdx.x < gridDim.x)
      part = {__ldcg(&written[threadIdx.x].sum), __ldcg(&written[threadIdx.x].count)};
    part = block_sum(part, parts[1]);
  }
  if (threadIdx.x > 0) return;
  const double rows = mean ? static_cast<double>(part.count) : 1.0;
  *loss = from_float<T>(static_cast<float>(part.sum / rows));
  *scale = static_cast<float>(1.0 / rows);
}

// Whether the GPU runs code in which the kernel waits. The driver may have compiled it from the PTX of an
// earlier architecture, which has no such instruction. Asked once a thread and GPU: it takes a driver call.
bool waits_for_losses() {
  thread_local std::map<int, bool> known;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  if (const auto found = known.find(device); found != known.end()) return found->second;
  cudaFuncAttributes attributes = {};
  CUDA_CHECK(cudaFuncGetAttributes(&attributes, cross_entropy_mean_kernel<float>));
  return known[device] = attributes.ptxVersion >= 90;
}

}  // namespace

void cross_entropy_mean(const CrossEntropyMeanArgs& args) {
  const int64_t blocks = std::clamp(cdiv(args.M, ROWS_PER_BLOCK), int64_t{1}, MOST_BLOCKS);
  const bool shared = blocks > 1;
  auto* written = shared ? static_cast<Part*>(args.memory->workspace(blocks * sizeof(Part))) : nullptr;
  auto* counter = shared ? static_cast<unsigned*>(args.memory->zeroed()) : nullptr;
  // Right behind the kernel of the losses: without rows there is none, and a counter may be zeroed in
  // between.
  const bool is_early = args.M > 0 && !shared && waits_for_losses();
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto launch = [&](auto... arguments) {
      const auto kernel = cross_entropy_mean_kernel<T>;
      const auto grid = static_cast<unsigned>(blocks);
      if (is_early) return launch_early(grid, THREADS, args.stream, kernel, arguments...);
      kernel<<<grid, THREADS, 0, args.stream>>>(arguments...);
    };
    launch(args.losses, args.target, static_cast<T*>(args.loss), args.scale, args.M, args.ignore_index,
           args.mean, written, counter);
  });
  CUDA_CHECK(cudaGetLastError());
}
