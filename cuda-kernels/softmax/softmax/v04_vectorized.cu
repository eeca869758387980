// softmax v04_vectorized: 16 bytes an access, also in misaligned rows.
//
// Change:   a thread holds packs of 16 bytes instead of single elements. If a row does not start at a
//           multiple of 16 bytes, its first and last pack are ragged, and are loaded and stored element by
//           element.
// Why:      an eighth of the loads and stores in bf16, so as many accesses in flight carry more bytes.
// Counter:  sectors_per_load becomes 16; instructions and time fall, dram_share rises.
// Requires: contiguous rows of up to 64 KiB. Stores of 16 bytes need out's rows to have x's skew.
// Source:   CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"
// Gap:      Triton chooses the width of an access by itself.
#include "args.h"
#include "online.cuh"

namespace {

constexpr int FEW_THREADS = 256, FEW_PACKS = 4;     // for rows of up to 16 KiB
constexpr int MANY_THREADS = 1024, MANY_PACKS = 5;  // as many as fit 64 registers a thread
constexpr int64_t LARGEST_ROW = 64 * 1024;          // bytes
static_assert(MANY_THREADS * MANY_PACKS >= LARGEST_ROW / 16 + 1, "a skewed row needs a pack more");

// x: [M, N], rows stride_xm apart; out: [M, N]. A row has at most THREADS * PACKS packs.
template <typename T, int THREADS, int PACKS>
__global__ void __launch_bounds__(THREADS)
    softmax_v04_vectorized_kernel(const T* __restrict__ x, T* __restrict__ out, int N, int64_t stride_xm,
                                  bool log) {
  __shared__ MaxSum parts[32];
  const int64_t row = blockIdx.x;
  const T* row_x = x + row * stride_xm;
  T* row_out = out + row * N;
  const int skew = skew_of(row_x);
  const bool aligned = skew_of(row_out) == skew;
  const auto first_of = [&](int i) {
    return (i * THREADS + static_cast<int>(threadIdx.x)) * Pack<T>::SIZE - skew;
  };

  Pack<T> held[PACKS];
  load_whole_packs(held, row_x, N, true, -INFINITY, first_of);
  load_other_packs(held, row_x, N, true, -INFINITY, first_of);

  MaxSum mine;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) mine.max = fmaxf(mine.max, max_of(held[i]));
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    keep_packed(held[i]);
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) mine.sum += exp_of(to_float(held[i][j]) - origin(mine.max));
  }
  const MaxSum whole = block_merge(mine, parts);

  const auto write = [&](auto result) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(held[i]);
      Pack<T> pack;
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) set(pack, j, from_float<T>(result(to_float(held[i][j]))));
      store_pack(row_out, first_of(i), N, aligned, pack);
    }
  };
  if (log) {
    write(LogSoftmax(whole));
  } else {
    write(Softmax(whole));
  }
}

template <typename T, int THREADS, int PACKS>
void launch(const SoftmaxArgs& args) {
  launch_rows(args.M, [&](int64_t first, int64_t rows) {
    softmax_v04_vectorized_kernel<T, THREADS, PACKS><<<rows, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.x) + first * args.stride_xm, static_cast<T*>(args.out) + first * args.N,
        static_cast<int>(args.N), args.stride_xm, args.log);
  });
}

}  // namespace

void softmax_v04_vectorized(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (bytes > LARGEST_ROW) {
      throw std::runtime_error("x has rows of " + std::to_string(bytes) + " bytes, v04_vectorized holds " +
                               std::to_string(LARGEST_ROW) + ": take v02_online or v07_cluster");
    }
    if (most_packs<T>(args.x, args.N, args.stride_xm) <= FEW_THREADS * FEW_PACKS) {
      launch<T, FEW_THREADS, FEW_PACKS>(args);
    } else {
      launch<T, MANY_THREADS, MANY_PACKS>(args);
    }
  });
  CUDA_CHECK(cudaGetLastError());
}
