// layer_norm v02_welford: both statistics in one pass.
//
// Change:   a thread keeps the count, the mean and the squared distances of its elements so far. Every
//           element moves the mean, and adds the product of its distances from the old and the new mean.
//           Threads' statistics are merged by Chan's formula.
// Why:      one pass over the row less, and one wait of the block less, at the price of a division an
//           element. The relative error of the squared distances is at most about N eps kappa, with kappa =
//           sqrt(1 + mean^2 / var); that of mean(x^2) - mean(x)^2 has kappa^2.
// Counter:  loads fall; instructions and time rise, by the divisions.
// Requires: rows that are contiguous; any length.
// Source:   Welford, Technometrics 4(3), 1962; Chan, Golub and LeVeque, "Algorithms for computing the sample
//           variance", The American Statistician 37(3), 1983
// Twin:     triton-kernels/norm/layer_norm/v02_welford.py
#include "args.h"
#include "norm/norm.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int64_t MOST_BLOCKS = 1 << 30;

struct Moments {
  float count = 0.0f, mean = 0.0f, squares = 0.0f;

  __device__ void add(float value) {
    count += 1.0f;
    const float distance = value - mean;
    mean += distance / count;
    squares += distance * (value - mean);
  }
};

__device__ Moments merge(Moments a, Moments b) {
  const float count = a.count + b.count;
  if (b.count == 0.0f) return a;
  const float distance = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + distance * share, a.squares + b.squares + distance * distance * a.count * share};
}

template <typename T>
__global__ void __launch_bounds__(THREADS) layer_norm_v02_welford_kernel(const LayerNormArgs args) {
  __shared__ Moments parts[WARPS];
  const int64_t N = args.N;
  for (int64_t index = blockIdx.x; index < args.M; index += gridDim.x) {
    const NormRow<T> row(args, index);

    Moments mine;
    for (int64_t col = threadIdx.x; col < N; col += THREADS) {
      const T value = row.input(col);
      if (row.added) row.added[col] = value;
      mine.add(to_float(value));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      mine = merge(mine, {__shfl_down_sync(0xffffffff, mine.count, distance),
                          __shfl_down_sync(0xffffffff, mine.mean, distance),
                          __shfl_down_sync(0xffffffff, mine.squares, distance)});
    }
    __syncthreads();  // for all to have read the parts of the row before
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
    __syncthreads();  // for every warp's part
    Moments whole = parts[0];
    for (int warp_id = 1; warp_id < WARPS; ++warp_id) whole = merge(whole, parts[warp_id]);

    const float mean = N > 0 ? whole.mean : NAN;
    const float rstd = rstd_of(whole.squares, N, args.eps);
    for (int64_t col = threadIdx.x; col < N; col += THREADS) {
      row.out[col] = row.result((to_float(row.input(col)) - mean) * rstd, col);
    }
    if (threadIdx.x == 0) {
      args.mean[index] = mean;
      args.rstd[index] = rstd;
    }
  }
}

}  // namespace

void layer_norm_v02_welford(const LayerNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    layer_norm_v02_welford_kernel<decltype(zero)>
        <<<std::min(args.M, MOST_BLOCKS), THREADS, 0, args.stream>>>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
