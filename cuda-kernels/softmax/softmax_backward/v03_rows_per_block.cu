// softmax_backward v03_rows_per_block: 16 bytes an access, and as many threads for a row as it needs.
//
// Change:   the ideas of softmax's v04 and v05: threads hold packs of 16 bytes; rows of up to 32 packs get
//           one lane for each pack, rows of up to 96 packs one warp, longer ones as many warps as hold them.
// Why:      an eighth of the loads and stores in bf16. With two rows to read, a thread has twice as many
//           bytes in flight as in the forward pass, which should be enough to saturate device memory at a row
//           of 4096.
// Counter:  dram_share rises; the time falls most at rows of 256.
// Requires: contiguous rows of up to 32 KiB. Accesses of 16 bytes to dout and out need their rows to have y's
//           skew.
// Source:   one warp a row in PyTorch, aten/src/ATen/native/cuda/PersistentSoftmax.cuh
// Twin:     triton-kernels/softmax/softmax_backward/v03_rows_per_block.py
#include "args.h"
#include "gradient.cuh"

namespace {

constexpr int BLOCK_THREADS = 256;            // of blocks whose warps hold one row or several
constexpr int PACKS = 3, MOST_THREADS = 704;  // if several warps hold a row
constexpr int64_t LARGEST_ROW = 32 * 1024;    // bytes
static_assert(MOST_THREADS * PACKS >= LARGEST_ROW / 16 + 1, "a skewed row needs a pack more");

// Register-resident rows of dout and y, held by `threads` threads; this one is number `thread`.
template <typename T, int PACKS>
struct HeldRows {
  Pack<T> dout[PACKS], y[PACKS];
  int N, skew, thread, threads;

  __device__ HeldRows(const T* row_dout, const T* row_y, int N, int thread, int threads)
      : N(N), skew(skew_of(row_y)), thread(thread), threads(threads) {
    const auto first = [this](int i) { return first_of(i); };
    const bool aligned = skew_of(row_dout) == skew;
    load_whole_packs(dout, row_dout, N, aligned, 0.0f, first);
    load_whole_packs(y, row_y, N, true, 0.0f, first);
    load_other_packs(dout, row_dout, N, aligned, 0.0f, first);
    load_other_packs(y, row_y, N, true, 0.0f, first);
  }

  __device__ int first_of(int i) const { return (i * threads + thread) * Pack<T>::SIZE - skew; }

  __device__ float sum(bool log) {
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) mine += term_of(to_float(dout[i][j]), to_float(y[i][j]), log);
    }
    return mine;
  }

  template <typename Gradient>
  __device__ void write(T* row_out, Gradient gradient) {
    const bool aligned = skew_of(row_out) == skew;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(dout[i]);
      keep_packed(y[i]);
      Pack<T> pack;
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) {
        set(pack, j, from_float<T>(gradient(to_float(dout[i][j]), to_float(y[i][j]))));
      }
      store_pack(row_out, first_of(i), N, aligned, pack);
    }
  }
};

// dout, y: [M, N], rows stride_dm and stride_ym apart; out: [M, N]. Each group of LANES lanes holds a row, of
// at most LANES * PACKS packs.
template <typename T, int LANES, int PACKS>
__global__ void __launch_bounds__(BLOCK_THREADS)
    softmax_backward_v03_rows_per_block_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                               T* __restrict__ out, int64_t M, int N, int64_t stride_dm,
                                               int64_t stride_ym, bool log) {
  constexpr int ROWS = BLOCK_THREADS / LANES;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  // Lanes past the last row load that row again, since the shuffles need all 32 lanes.
  const int64_t read = min(row, M - 1);
  HeldRows<T, PACKS> held(dout + read * stride_dm, y + read * stride_ym, N, threadIdx.x % LANES, LANES);
  const float sum = lanes_sum<LANES>(held.sum(log));
  if (row >= M) return;
  if (log) {
    held.write(out + row * N, LogSoftmaxGradient{sum});
  } else {
    held.write(out + row * N, SoftmaxGradient{sum});
  }
}

// The same with one row a block, of at most blockDim.x * PACKS packs.
template <typename T>
__global__ void __launch_bounds__(MOST_THREADS, 1)
    softmax_backward_v03_rows_per_block_kernel(const T* __restrict__ dout, const T* __restrict__ y,
                                               T* __restrict__ out, int N, int64_t stride_dm,
                                               int64_t stride_ym, bool log) {
  __shared__ float parts[32];
  const int64_t row = blockIdx.x;
  HeldRows<T, PACKS> held(dout + row * stride_dm, y + row * stride_ym, N, threadIdx.x, blockDim.x);
  const float sum = block_sum(held.sum(log), parts);
  if (log) {
    held.write(out + row * N, LogSoftmaxGradient{sum});
  } else {
    held.write(out + row * N, SoftmaxGradient{sum});
  }
}

template <typename T, int LANES, int PACKS = 1>
void launch_lanes(const SoftmaxBackwardArgs& args) {
  constexpr int ROWS = BLOCK_THREADS / LANES;
  softmax_backward_v03_rows_per_block_kernel<T, LANES, PACKS>
      <<<cdiv(args.M, ROWS), BLOCK_THREADS, 0, args.stream>>>(
          static_cast<const T*>(args.dout), static_cast<const T*>(args.y), static_cast<T*>(args.out), args.M,
          static_cast<int>(args.N), args.stride_dm, args.stride_ym, args.log);
}

template <typename T>
void launch_block(const SoftmaxBackwardArgs& args, int64_t packs) {
  const int64_t threads = cdiv(cdiv(packs, PACKS), 32) * 32;
  softmax_backward_v03_rows_per_block_kernel<T><<<args.M, threads, 0, args.stream>>>(
      static_cast<const T*>(args.dout), static_cast<const T*>(args.y), static_cast<T*>(args.out),
      static_cast<int>(args.N), args.stride_dm, args.stride_ym, args.log);
}

template <typename T>
void launch(const SoftmaxBackwardArgs& args) {
  const int64_t packs = most_packs<T>(args.y, args.N, args.stride_ym);
  // The grid is never too large: each block writes at least 512 bytes, and 2^31 blocks would write 1 TiB.
  if (packs == 1) return launch_lanes<T, 1>(args);
  if (packs == 2) return launch_lanes<T, 2>(args);
  if (packs <= 4) return launch_lanes<T, 4>(args);
  if (packs <= 8) return launch_lanes<T, 8>(args);
  if (packs <= 16) return launch_lanes<T, 16>(args);
  if (packs <= 32) return launch_lanes<T, 32>(args);
  if (packs <= 64) return launch_lanes<T, 32, 2>(args);
  if (packs <= 96) return launch_lanes<T, 32, 3>(args);
  launch_block<T>(args, packs);
}

}  // namespace

void softmax_backward_v03_rows_per_block(const SoftmaxBackwardArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (bytes > LARGEST_ROW) {
      throw std::runtime_error("dout has rows of " + std::to_string(bytes) +
                               " bytes, v03_rows_per_block holds " + std::to_string(LARGEST_ROW) +
                               ": take v01_two_passes or v04_cluster");
    }
    launch<T>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
