// softmax v06_pipelined: persistent blocks; the next rows travel to shared memory while one is computed.
//
// Change:   a few blocks an SM loop over the rows. The copy engine brings rows into a ring of stages, one
//           whole row a stage; an mbarrier says when a stage is complete.
// Why:      a block that loads, computes, stores and ends leaves the memory idle unless other blocks fill in,
//           and few blocks with long rows fit on an SM. A copy that needs no registers can always be in
//           flight.
// Counter:  stalls on long_scoreboard vanish, instructions rise; dram_share should stay near v05's.
// Requires: compute capability 9.0 with its 227 KiB of shared memory; contiguous rows of up to 220 KiB. Rows
//           of up to 110 KiB have two stages, so that copy and computation overlap.
// Source:   PTX ISA, "cp.async.bulk" and "mbarrier"
// Twin:     triton-kernels/softmax/softmax/v06_pipelined.py
#include <algorithm>

#include "args.h"
#include "lib/ptx/hopper.cuh"
#include "online.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int MOST_STAGES = 8;
constexpr int MOST_BLOCKS_PER_SM = 4;
constexpr int64_t LARGEST_ROW = 220 * 1024;   // bytes
constexpr int64_t SM_BYTES = 227 * 1024;      // shared memory of an SM
constexpr int64_t BLOCK_OVERHEAD = 2 * 1024;  // shared memory of a block beside its stages

// x: [M, N], rows stride_xm apart; out: [M, N]. The ring has `stages` stages of stage_bytes each.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    softmax_v06_pipelined_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                 int64_t stride_xm, int stages, int stage_bytes, bool log) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char ring[];  // [stages][stage_bytes]
  __shared__ uint64_t arrived[MOST_STAGES];      // a phase completes when the stage's row has arrived
  __shared__ MaxSum parts[2][32];                // two sets, so that no barrier is needed before reuse
  constexpr int SIZE = Pack<T>::SIZE;

  // A row's packs are [0, packs). The copy engine brings [head, tail), which are whole; threads load the
  // ragged ones.
  struct Extent {
    int skew, packs, head, tail;
    __device__ Extent(const T* row_x, int N)
        : skew(skew_of(row_x)),
          packs((N + skew + SIZE - 1) / SIZE),
          head(skew > 0),
          tail((N + skew) / SIZE) {}
  };
  const auto fill = [&](int64_t row, int stage) {
    const T* row_x = x + row * stride_xm;
    const Extent extent(row_x, N);
    const int bytes = max(0, extent.tail - extent.head) * 16;
    mbarrier_arrive_expect_tx(&arrived[stage], bytes);
    if (bytes == 0) return;
    bulk_load(ring + stage * stage_bytes + extent.head * 16, row_x - extent.skew + extent.head * SIZE, bytes,
              &arrived[stage]);
  };

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) mbarrier_init(&arrived[stage], 1);
    fence_mbarrier_init();
    for (int stage = 0; stage < stages; ++stage) {
      const int64_t row = blockIdx.x + static_cast<int64_t>(stage) * gridDim.x;
      if (row < M) fill(row, stage);
    }
  }
  __syncthreads();  // waits for the mbarriers to be initialised

  int stage = 0, parity = 0, turn = 0;  // parity flips once a round of the ring, turn once a row
  for (int64_t row = blockIdx.x; row < M; row += gridDim.x) {
    const T* row_x = x + row * stride_xm;
    T* row_out = out + row * N;
    const Extent extent(row_x, N);
    const bool aligned = skew_of(row_out) == extent.skew;
    Pack<T>* held = reinterpret_cast<Pack<T>*>(ring + stage * stage_bytes);

    // The ragged packs. Each thread reads the same packs in all passes, so what it loads itself needs no
    // barrier.
    for (int pack = threadIdx.x; pack < extent.packs; pack += THREADS) {
      const int first = pack * SIZE - extent.skew;
      if (!is_whole<T>(first, N)) held[pack] = load_ragged(row_x, first, N, -INFINITY);
    }
    mbarrier_wait_parity(&arrived[stage], parity);  // waits for the copy of this row

    MaxSum mine;
#pragma unroll 4
    for (int pack = threadIdx.x; pack < extent.packs; pack += THREADS) {
      mine.max = fmaxf(mine.max, max_of(held[pack]));
    }
#pragma unroll 4
    for (int pack = threadIdx.x; pack < extent.packs; pack += THREADS) {
      const Pack<T> values = held[pack];
#pragma unroll
      for (int j = 0; j < SIZE; ++j) mine.sum += exp_of(to_float(values[j]) - origin(mine.max));
    }
    const MaxSum whole = block_merge(mine, parts[turn]);

    const auto write = [&](auto result) {
#pragma unroll 4
      for (int pack = threadIdx.x; pack < extent.packs; pack += THREADS) {
        Pack<T> values = held[pack];
#pragma unroll
        for (int j = 0; j < SIZE; ++j) set(values, j, from_float<T>(result(to_float(values[j]))));
        store_pack(row_out, pack * SIZE - extent.skew, N, aligned, values);
      }
    };
    if (log) {
      write(LogSoftmax(whole));
    } else {
      write(Softmax(whole));
    }

    // Orders the threads' accesses to the stage before the next bulk copy into it.
    fence_proxy_async();
    __syncthreads();  // waits until every thread has finished with the stage
    const int64_t next = row + static_cast<int64_t>(stages) * gridDim.x;
    if (threadIdx.x == 0 && next < M) fill(next, stage);
    turn ^= 1;
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
#endif
}

}  // namespace

void softmax_v06_pipelined(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t bytes = args.N * sizeof(T);
    if (bytes > LARGEST_ROW) {
      throw std::runtime_error("x has rows of " + std::to_string(bytes) + " bytes, v06_pipelined holds " +
                               std::to_string(LARGEST_ROW) + ": take v02_online or v07_cluster");
    }
    const int64_t stage_bytes = cdiv(most_packs<T>(args.N) * 16, 128) * 128;
    const int64_t pairs = SM_BYTES / (2 * stage_bytes + BLOCK_OVERHEAD);
    const int64_t blocks_per_sm = std::clamp<int64_t>(pairs, 1, MOST_BLOCKS_PER_SM);
    const int64_t room = (SM_BYTES - blocks_per_sm * BLOCK_OVERHEAD) / blocks_per_sm;
    const int stages = static_cast<int>(std::clamp<int64_t>(room / stage_bytes, 1, MOST_STAGES));
    const int64_t grid = std::min<int64_t>(args.M, multiprocessor_count() * blocks_per_sm);
    const auto kernel = softmax_v06_pipelined_kernel<T>;
    allow_shared_memory(kernel, static_cast<int>(SM_BYTES - BLOCK_OVERHEAD));
    kernel<<<grid, THREADS, stages * stage_bytes, args.stream>>>(
        static_cast<const T*>(args.x), static_cast<T*>(args.out), args.M, static_cast<int>(args.N),
        args.stride_xm, stages, static_cast<int>(stage_bytes), args.log);
  });
  CUDA_CHECK(cudaGetLastError());
}
