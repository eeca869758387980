// vector_add v05_bulk_ring: bulk asynchronous copies (cp.async.bulk) through a ring in shared memory.
//
// Change:   one thread of a block asks the copy engine for the next tiles of a and b; all threads add the
//           tile that has arrived, in place in shared memory, and the engine carries the sum away.
// Why:      one instruction asks for kilobytes, registers hold nothing while data travel, and up to 64 KiB
//           are in flight to every SM. v04 is at the memory's limit already, so this should only tie.
// Counter:  load_requests vanish; time should not move.
// Requires: compute capability 9.0. Contiguous tensors of any size; unless all three addresses are multiples
//           of 16 bytes, which the copy engine asks for, every element is added as in v02.
// Twin:     triton-kernels/elementwise/vector_add/v05_bulk_ring.py
#include <algorithm>

#include "args.h"
#include "lib/common.cuh"
#include "lib/ptx/hopper.cuh"

constexpr int THREADS = 256;
constexpr int TILE = THREADS;  // vectors of 16 bytes, one a thread: 4 KiB
constexpr int STAGES = 5;      // while a block waits, one is being stored and four are in flight: 32 KiB
constexpr int BLOCKS_PER_SM = 2;
constexpr int LINE = 8;  // vectors in a cache line of 128 bytes

static_assert(TILE % LINE == 0, "a tile is whole cache lines");
static_assert(STAGES >= 3, "one stage is added and one is stored while another is loaded");
static_assert(2 * STAGES * TILE * 16 + STAGES * 8 <= 48 * 1024, "the ring fits static shared memory");

// a, b, out: [n]. The copy engine moves the first `vectors` * 16 bytes of each. In `full_rounds` rounds every
// block takes a whole tile, neighbouring blocks taking neighbouring tiles. One more round shares the rest
// evenly, at most `last_tile` vectors a block, so that all blocks end together. No __restrict__: out may be a
// or b.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    vector_add_v05_bulk_ring_kernel(const T* a, const T* b, T* out, int64_t n, int64_t vectors,
                                    int full_rounds, int last_tile) {
#if __CUDA_ARCH__ >= 900
  using Vector = Pack<T>;
  __shared__ alignas(128) Vector a_tiles[STAGES][TILE];  // the sum takes the place of a
  __shared__ alignas(128) Vector b_tiles[STAGES][TILE];
  __shared__ uint64_t arrived[STAGES];  // a phase completes when both tiles of the stage have arrived

  // This block's tiles, in vectors from the start of a, b and out.
  const int64_t block = blockIdx.x;
  const int64_t round_vectors = static_cast<int64_t>(gridDim.x) * TILE;
  const int64_t last_begin = full_rounds * round_vectors + block * last_tile;
  const int last_size = max(int64_t{0}, min(int64_t{last_tile}, vectors - last_begin));
  const int rounds = full_rounds + (last_size > 0);
  const auto tile_begin = [&](int round) {
    return round < full_rounds ? round * round_vectors + block * TILE : last_begin;
  };
  const auto tile_size = [&](int round) { return round < full_rounds ? TILE : last_size; };

  const uint64_t policy = l2_evict_first_policy();
  const auto fill = [&](int round, int stage) {
    const uint32_t bytes = tile_size(round) * sizeof(Vector);
    mbarrier_arrive_expect_tx(&arrived[stage], 2 * bytes);
    bulk_load(a_tiles[stage], a + tile_begin(round) * Vector::SIZE, bytes, &arrived[stage], policy);
    bulk_load(b_tiles[stage], b + tile_begin(round) * Vector::SIZE, bytes, &arrived[stage], policy);
  };

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) mbarrier_init(&arrived[stage], 1);
    fence_mbarrier_init();
    for (int round = 0; round < min(STAGES, rounds); ++round) fill(round, round);
  }
  __syncthreads();  // waits for the mbarriers to be initialised

  int stage = 0;
  int parity = 0;  // flips each time around the ring
  for (int round = 0; round < rounds; ++round) {
    mbarrier_wait_parity(&arrived[stage], parity);  // waits for the copies of a and b into this stage
    if (threadIdx.x < tile_size(round)) {
      a_tiles[stage][threadIdx.x] = a_tiles[stage][threadIdx.x] + b_tiles[stage][threadIdx.x];
      fence_proxy_async();  // the copy engine is about to read what this thread wrote
    }
    __syncthreads();  // waits for every thread's part of the sum
    if (threadIdx.x == 0) {
      bulk_store(out + tile_begin(round) * Vector::SIZE, a_tiles[stage], tile_size(round) * sizeof(Vector),
                 policy);
      bulk_commit_group();
      // Only now is the stage of the round before refilled: its store has had a whole round to read it.
      const int next = round - 1 + STAGES;
      if (round > 0 && next < rounds) {
        bulk_wait_group_read<1>();  // waits for all stores but the one just issued
        fill(next, (stage + STAGES - 1) % STAGES);
      }
    }
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }

  // The remainder, one element a thread.
  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = vectors * Vector::SIZE + first; i < n; i += stride) {
    out[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
  }
  if (threadIdx.x == 0) bulk_wait_group_read<0>();  // shared memory must outlive the stores that read it
#endif
}

void vector_add_v05_bulk_ring(const VectorAddArgs& args) {
  if (args.n == 0) return;
  const int64_t grid = multiprocessor_count() * BLOCKS_PER_SM;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t vectors = aligned_to_16_bytes(args.a, args.b, args.out) ? args.n / Pack<T>::SIZE : 0;
    const int64_t full_rounds = vectors / (grid * TILE);
    const int64_t left = vectors - full_rounds * grid * TILE;
    const int64_t last_tile = cdiv(cdiv(left, grid), LINE) * LINE;
    vector_add_v05_bulk_ring_kernel<<<grid, THREADS, 0, args.stream>>>(
        static_cast<const T*>(args.a), static_cast<const T*>(args.b), static_cast<T*>(args.out), args.n,
        vectors, static_cast<int>(full_rounds), static_cast<int>(last_tile));
  });
  CUDA_CHECK(cudaGetLastError());
}
