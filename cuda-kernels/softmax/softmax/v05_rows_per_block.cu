// softmax v05_rows_per_block: a row gets as many threads as it needs.
//
// Change:   a row of up to 32 packs gets one lane for each pack, so that a warp holds several rows; a row of
//           up to 128 packs gets one warp, a longer one as many warps as hold it in five packs a thread.
// Why:      of a block of 256 threads most are idle in a row of 256 elements, and the block still waits at a
//           barrier. Lanes of one warp need only shuffles, and a block then has many rows in flight.
// Counter:  instructions fall; the time stays at a row of 4096, and falls most at the shortest rows.
// Requires: contiguous rows of up to 64 KiB. Stores of 16 bytes need out's rows to have x's skew.
// Source:   one warp a row in PyTorch, aten/src/ATen/native/cuda/PersistentSoftmax.cuh
// Twin:     triton-kernels/softmax/softmax/v05_rows_per_block.py
#include "args.h"
#include "online.cuh"

namespace {

constexpr int BLOCK_THREADS = 256;            // of blocks whose warps hold one row or several
constexpr int MOST_WARP_PACKS = 4;            // a lane, if one warp holds the row
constexpr int PACKS = 5, MOST_THREADS = 832;  // if several warps do: keeps 64 KiB an SM in flight
constexpr int64_t LARGEST_ROW = 64 * 1024;    // bytes
static_assert(MOST_THREADS * PACKS >= LARGEST_ROW / 16 + 1, "a skewed row needs a pack more");

// A register-resident row, held by `threads` threads; this one is number `thread`.
template <typename T, int PACKS>
struct HeldRow {
  Pack<T> packs[PACKS];
  int N, skew, thread, threads;

  __device__ HeldRow(const T* row_x, int N, int thread, int threads)
      : N(N), skew(skew_of(row_x)), thread(thread), threads(threads) {
    const auto first = [this](int i) { return first_of(i); };
    load_whole_packs(packs, row_x, N, true, -INFINITY, first);
    load_other_packs(packs, row_x, N, true, -INFINITY, first);
  }

  __device__ int first_of(int i) const { return (i * threads + thread) * Pack<T>::SIZE - skew; }

  __device__ MaxSum max_sum() {
    MaxSum mine;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) mine.max = fmaxf(mine.max, max_of(packs[i]));
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(packs[i]);
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) mine.sum += exp_of(to_float(packs[i][j]) - origin(mine.max));
    }
    return mine;
  }

  template <typename Result>
  __device__ void write(T* row_out, Result result) {
    const bool aligned = skew_of(row_out) == skew;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(packs[i]);
      Pack<T> pack;
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) set(pack, j, from_float<T>(result(to_float(packs[i][j]))));
      store_pack(row_out, first_of(i), N, aligned, pack);
    }
  }
};

// x: [M, N], rows stride_xm apart; out: [M, N]. Each group of LANES lanes holds a row, of at most LANES *
// PACKS packs.
template <typename T, int LANES, int PACKS>
__global__ void __launch_bounds__(BLOCK_THREADS)
    softmax_v05_rows_per_block_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                      int64_t stride_xm, bool log) {
  constexpr int ROWS = BLOCK_THREADS / LANES;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  // Lanes past the last row load that row again, since the shuffles need all 32 lanes.
  HeldRow<T, PACKS> held(x + min(row, M - 1) * stride_xm, N, threadIdx.x % LANES, LANES);
  const MaxSum whole = lanes_merge<LANES>(held.max_sum());
  if (row >= M) return;
  if (log) {
    held.write(out + row * N, LogSoftmax(whole));
  } else {
    held.write(out + row * N, Softmax(whole));
  }
}

// The same with one row a block, of at most blockDim.x * PACKS packs.
template <typename T>
__global__ void __launch_bounds__(MOST_THREADS)
    softmax_v05_rows_per_block_kernel(const T* __restrict__ x, T* __restrict__ out, int N, int64_t stride_xm,
                                      bool log) {
  __shared__ MaxSum parts[32];
  const int64_t row = blockIdx.x;
  HeldRow<T, PACKS> held(x + row * stride_xm, N, threadIdx.x, blockDim.x);
  const MaxSum whole = block_merge(held.max_sum(), parts);
  if (log) {
    held.write(out + row * N, LogSoftmax(whole));
  } else {
    held.write(out + row * N, Softmax(whole));
  }
}

template <typename T, int LANES, int PACKS = 1>
void launch_lanes(const SoftmaxArgs& args) {
  constexpr int ROWS = BLOCK_THREADS / LANES;
  softmax_v05_rows_per_block_kernel<T, LANES, PACKS><<<cdiv(args.M, ROWS), BLOCK_THREADS, 0, args.stream>>>(
      static_cast<const T*>(args.x), static_cast<T*>(args.out), args.M, static_cast<int>(args.N),
      args.stride_xm, args.log);
}

template <typename T>
void launch_block(const SoftmaxArgs& args, int64_t packs) {
  const int64_t threads = cdiv(cdiv(packs, PACKS), 32) * 32;
  softmax_v05_rows_per_block_kernel<T>
      <<<args.M, threads, 0, args.stream>>>(static_cast<const T*>(args.x), static_cast<T*>(args.out),
                                            static_cast<int>(args.N), args.stride_xm, args.log);
}

template <typename T>
void launch(const SoftmaxArgs& args) {
  const int64_t packs = most_packs<T>(args.x, args.N, args.stride_xm);
  // The grid is never too large: each block writes at least 512 bytes, and 2^31 blocks would write 1 TiB.
  if (packs == 1) return launch_lanes<T, 1>(args);
  if (packs == 2) return launch_lanes<T, 2>(args);
  if (packs <= 4) return launch_lanes<T, 4>(args);
  if (packs <= 8) return launch_lanes<T, 8>(args);
  if (packs <= 16) return launch_lanes<T, 16>(args);
  if (packs <= 32) return launch_lanes<T, 32>(args);
  if (packs <= 64) return launch_lanes<T, 32, 2>(args);
  if (packs <= 96) return launch_lanes<T, 32, 3>(args);
  if (packs <= 32 * MOST_WARP_PACKS) return launch_lanes<T, 32, MOST_WARP_PACKS>(args);
  launch_block<T>(args, packs);
}

}  // namespace

void softmax_v05_rows_per_block(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (bytes > LARGEST_ROW) {
      throw std::runtime_error("x has rows of " + std::to_string(bytes) +
                               " bytes, v05_rows_per_block holds " + std::to_string(LARGEST_ROW) +
                               ": take v02_online or v07_cluster");
    }
    launch<T>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
