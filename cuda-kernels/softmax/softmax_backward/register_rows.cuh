// The kernels of softmax_backward's v07 for rows of dout and y that registers hold: in lanes of a warp, or in
// the warps of a block. Terms: docs/glossary.md.
#pragma once

#include "args.h"
#include "gradient.cuh"

constexpr int GRADIENT_LANES_THREADS = 256;      // of blocks whose warps hold one row or several
constexpr int64_t GRADIENT_LANES_ROW = 96 * 16;  // bytes: the longest row that one warp holds
constexpr int GRADIENT_BLOCK_PACKS = 3, GRADIENT_BLOCK_THREADS = 704;  // where several warps hold a row
constexpr int64_t GRADIENT_BLOCK_ROW = 32 * 1024;  // bytes: the longest row that they hold
static_assert(GRADIENT_BLOCK_THREADS * GRADIENT_BLOCK_PACKS >= GRADIENT_BLOCK_ROW / 16 + LINE_PACKS,
              "a skewed row needs a line more");

// Rows of dout and y, held by `threads` threads; this one is number `thread`. Packs are counted from the last
// multiple of BYTES before y's row. Where dout's skew within 16 bytes differs, its elements come one by one.
template <typename T, int PACKS, int BYTES>
struct RegisterRows {
  Pack<T> dout[PACKS], y[PACKS];
  int N, skew, thread, threads;

  __device__ RegisterRows(const T* row_dout, const T* row_y, int N, int thread, int threads)
      : N(N), skew(skew_of<BYTES>(row_y)), thread(thread), threads(threads) {
    const auto first = [this](int i) { return first_of(i); };
    const bool aligned = skew_of(row_dout) == skew_of(row_y);
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

  // `skew_of_y`: within 16 bytes.
  template <typename Gradient>
  __device__ void write(T* row_out, int skew_of_y, Gradient gradient) {
    const bool aligned = skew_of(row_out) == skew_of_y;
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
__device__ void gradient_of_lanes_row(const T* __restrict__ dout, const T* __restrict__ y,
                                      T* __restrict__ out, int64_t M, int N, int64_t stride_dm,
                                      int64_t stride_ym, bool log) {
  constexpr int ROWS = GRADIENT_LANES_THREADS / LANES;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  // Lanes past the last row load that row again, since the shuffles need all 32 lanes.
  const int64_t read = min(row, M - 1);
  RegisterRows<T, PACKS, 16> held(dout + read * stride_dm, y + read * stride_ym, N, threadIdx.x % LANES,
                                  LANES);
  const float sum = lanes_sum<LANES>(held.sum(log));
  if (row >= M) return;
  if (log) {
    held.write(out + row * N, held.skew, PreciseLogGradient<T>{sum});
  } else {
    held.write(out + row * N, held.skew, SoftmaxGradient{sum});
  }
}

// The same with one row a block, of at most blockDim.x * GRADIENT_BLOCK_PACKS packs. A warp's packs are whole
// lines.
template <typename T>
__device__ void gradient_of_block_row(const T* __restrict__ dout, const T* __restrict__ y,
                                      T* __restrict__ out, int N, int64_t stride_dm, int64_t stride_ym,
                                      bool log) {
  __shared__ float warps[32];
  const T* const row_dout = dout + blockIdx.x * stride_dm;
  const T* const row_y = y + blockIdx.x * stride_ym;
  T* const row_out = out + static_cast<int64_t>(blockIdx.x) * N;
  RegisterRows<T, GRADIENT_BLOCK_PACKS, LINE_BYTES> held(row_dout, row_y, N, threadIdx.x, blockDim.x);
  const float sum = block_sum(held.sum(log), warps);
  if (log) {
    held.write(row_out, skew_of(row_y), PreciseLogGradient<T>{sum});
  } else {
    held.write(row_out, skew_of(row_y), SoftmaxGradient{sum});
  }
}

// Calls launch(LANES, PACKS, blocks), the first two as integral constants, with the fewest lanes that hold a
// row. Returns false, without a launch, if no warp holds it. The grid is never too large: each block writes
// 512 bytes or more.
template <typename T, typename Launch>
bool launch_lanes_rows(const SoftmaxBackwardArgs& args, Launch launch) {
  const int64_t most = most_packs<T>(args.y, args.N, args.stride_ym);
  const auto with = [&]<int LANES, int PACKS>(std::integer_sequence<int, LANES, PACKS>) {
    if (most > LANES * PACKS) return false;
    launch(std::integral_constant<int, LANES>{}, std::integral_constant<int, PACKS>{},
           cdiv(args.M, GRADIENT_LANES_THREADS / LANES));
    return true;
  };
  return with(std::integer_sequence<int, 1, 1>{}) || with(std::integer_sequence<int, 2, 1>{}) ||
         with(std::integer_sequence<int, 4, 1>{}) || with(std::integer_sequence<int, 8, 1>{}) ||
         with(std::integer_sequence<int, 16, 1>{}) || with(std::integer_sequence<int, 32, 1>{}) ||
         with(std::integer_sequence<int, 32, 2>{}) || with(std::integer_sequence<int, 32, 3>{});
}
