// attention_backward v09_deterministic: blocks add to dq in turns.
//
// Change:   blocks add to a tile of dq in the order in which they drew their tiles of keys. A counter for
//           each tile says whose turn it is. One thread waits for it, ahead of the consumers, and another one
//           passes it on when they have added. At D 64, where both consumers add to the same sums, they do so
//           one after the other. Queries are visited from the last one on. v08 added in any order.
// Why:      a sum of rounded numbers depends on their order, so that dq differed between runs. Blocks that
//           start together begin with the same queries, and each waits for the one before at its first tile
//           alone: from then on it is a tile behind. With the first queries first, a causal block would wait
//           until the heavier ones before it have come as far as its own first queries.
// Counter:  time rises a little.
// Requires: as v08.
// Source:   PTX ISA, "Memory Consistency Model"; FlashAttention-3's deterministic mode has such counters.
// Twin:     none: Triton's v02 has a kernel of its own for dq, whose order never changes
#include <cuda/atomic>

#include "delta.cuh"
#include "lib/activation.cuh"
#include "lib/head_band.cuh"
#include "lib/head_dispatch.h"
#include "lib/head_queue.cuh"
#include "lib/head_sums.cuh"
#include "lib/ptx/reduce.cuh"
#include "problem.h"

constexpr int CONSUMERS = 2;  // warpgroups that compute, TILE_ROWS keys each
constexpr int BLOCK = CONSUMERS * TILE_ROWS;
constexpr int STAGES = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;  // the first one moves data
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;

static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <= 65536, "of an SM");

// WIDTH is D, padded to whole panels.
template <int WIDTH>
struct Shared {
  uint8_t k[CONSUMERS][WIDTH / 64][TILE_BYTES], v[CONSUMERS][WIDTH / 64][TILE_BYTES];
  uint8_t q[STAGES][WIDTH / 64][TILE_BYTES], dout[STAGES][WIDTH / 64][TILE_BYTES];
  uint8_t ds[STAGES][CONSUMERS][TILE_BYTES];  // [keys, queries]
  float lse[STAGES][TILE_ROWS], delta[STAGES][TILE_ROWS];
  uint64_t own_full;                           // complete when keys have come, and `work` says which
  uint64_t own_empty;                          // when all who read them are done with both
  uint64_t full[STAGES];                       // when queries have come
  uint64_t empty[STAGES];                      // when all consumers have multiplied them
  uint64_t granted[STAGES];                    // when it is the block's turn to add to dq
  uint64_t passed[STAGES];                     // when who passes the turn on knows that it has been used
  uint64_t half_added[STAGES], added[STAGES];  // when the first consumer has added, and when both have
  Work work;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Starts a consumer's part of ds @ k: of 128 columns it has 64, for all keys; of 64 all, for its own keys.
template <typename T, int WIDTH>
__device__ inline void multiply_pairs(float (&dq)[QUADS * 4], Shared<WIDTH>& shared, int stage,
                                      int consumer) {
#pragma unroll
  for (int i = 0; i < WIDTH / 64; ++i) {
    const int source = WIDTH == 128 ? i : consumer;
    const uint64_t ds_tile = wgmma_tile(shared.ds[stage][source]);
    const uint64_t k_panel = wgmma_tile(shared.k[source][WIDTH == 128 ? consumer : 0]);
#pragma unroll
    for (int step = 0; step < TILE_ROWS / 16; ++step)
      wgmma_m64k16<64, T, true, false>(dq, ds_tile + step * (16 * ROW_BYTES / 16),
                                       k_panel + step * (16 * ROW_BYTES / 16), i + step > 0);
  }
}

// Turns scores [keys, queries] into p. lse is that of the tile's queries.
__device__ inline void exponentiate(float (&scores)[TILE_ROWS / 2], const float (&lse)[TILE_ROWS],
                                    float factor) {
#pragma unroll
  for (int j = 0; j < TILE_ROWS / 8; ++j) {
    const float2 own = *reinterpret_cast<const float2*>(&lse[j * 8 + threadIdx.x % 4 * 2]);
#pragma unroll
    for (int i = j * 4; i < j * 4 + 4; ++i)
      scores[i] = exp2_approx(fmaf(scores[i], factor, -(i % 2 ? own.y : own.x)));
  }
}

// Turns dp into ds. delta is that of the tile's queries.
__device__ inline void differentiate(const float (&p)[TILE_ROWS / 2], float (&dp)[TILE_ROWS / 2],
                                     const float (&delta)[TILE_ROWS]) {
#pragma unroll
  for (int j = 0; j < TILE_ROWS / 8; ++j) {
    const float2 own = *reinterpret_cast<const float2*>(&delta[j * 8 + threadIdx.x % 4 * 2]);
#pragma unroll
    for (int i = j * 4; i < j * 4 + 4; ++i) dp[i] = p[i] * (dp[i] - (i % 2 ? own.y : own.x));
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// The i-th visit of a tile of keys: the head among its group's, and the first query. Where heavy tiles, which
// are the first to be drawn, reach the last queries, these come first.
struct Visit {
  int head, row;
};

__device__ inline Visit visit_of(const Tiles& walk, const Queue& queue, int i) {
  const int tile = i % walk.count;
  return {i / walk.count, (walk.first + (queue.last_first ? tile : walk.count - 1 - tile)) * TILE_ROWS};
}

// How many blocks that see the TILE_ROWS queries from `row` on draw their keys before the block of `key`.
__device__ inline int blocks_before(const BackwardProblem& problem, const Queue& queue, int row, int key) {
  if (!queue.last_first) return key / BLOCK - max(row + problem.first, 0) / BLOCK;
  const int last_row = min(row + TILE_ROWS, problem.Sq) - 1;
  return min((last_row + problem.last) / BLOCK, queue.blocks - 1) - key / BLOCK;
}

// All gradients of the keys of drawn tiles. turns: [B, heads, tiles of queries], zero at first; how many
// blocks have added to a tile's sums. sums: fp32 [B, heads, tiles of queries, WIDTH / 64, PART],
// zero at first; the sums of dq, not scaled, in the order of QUADS and threads.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    attention_backward_v09_deterministic_kernel(const __grid_constant__ BackwardProblem problem,
                                                const Queue queue, float4* sums, unsigned* turns) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared<WIDTH>& shared = *reinterpret_cast<Shared<WIDTH>*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int thread = threadIdx.x % WARPGROUP;

  if (threadIdx.x == 0) {
    mbarrier_init(&shared.own_full, 2 * CONSUMERS);
    mbarrier_init(&shared.own_empty, CONSUMERS * WARPGROUP + 2);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 3);
      mbarrier_init(&shared.empty[stage], CONSUMERS * WARPGROUP);
      mbarrier_init(&shared.granted[stage], 1);
      mbarrier_init(&shared.passed[stage], 1);
      mbarrier_init(&shared.half_added[stage], WARPGROUP);
      mbarrier_init(&shared.added[stage], CONSUMERS * WARPGROUP);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // for the barriers

  // Both sides count the block's tiles of keys, and its tiles of queries over all of these.
  uint32_t turn = 0, visit = 0;

  if (warpgroup == 0) {
    give_back_registers<PRODUCER_REGISTERS>();
    const int warp = thread / 32;
    if (thread % 32 != 0 || warp == 3) return;
    if (warp > 0) {  // keeps the order of turns
      for (;; ++turn) {
        mbarrier_wait_parity(&shared.own_full, turn % 2);  // for `work`
        const Work work = shared.work;
        if (work.head < 0) return;
        mbarrier_arrive(&shared.own_empty);
        const Tiles walk = queries_of(problem, work.row, BLOCK);
        for (int i = 0; i < walk.count * problem.group; ++i, ++visit) {
          const int stage = visit % STAGES;
          const Visit own = visit_of(walk, queue, i);
          const int64_t head = static_cast<int64_t>(work.head) * problem.group + own.head;
          const unsigned mine = blocks_before(problem, queue, own.row, work.row);
          const cuda::atomic_ref<unsigned, cuda::thread_scope_device> next(
              turns[head * (problem.padded / TILE_ROWS) + own.row / TILE_ROWS]);
          if (warp == 1) {
            mbarrier_wait_parity(&shared.passed[stage], visit / STAGES % 2 ^ 1);  // for the stage's last turn
            while (next.load(cuda::memory_order_acquire) != mine) {               // for who comes before
            }
            mbarrier_arrive(&shared.granted[stage]);
          } else {
            mbarrier_wait_parity(&shared.added[stage], visit / STAGES % 2);  // for all threads' sums
            mbarrier_arrive(&shared.passed[stage]);
            next.store(mine + 1, cuda::memory_order_release);
          }
        }
      }
    }
    // Blocks draw until they are behind the last tile, late: who ends first draws first. They draw the first
    // one, too: a block waits for earlier tiles, which running blocks must have.
    for (;; ++turn) {
      const Work work = work_of(queue, atomicInc(queue.drawn, queue.tiles + gridDim.x - 1));
      mbarrier_wait_parity(&shared.own_empty, turn % 2 ^ 1);  // for the last tile's end
      shared.work = work;
      if (work.head < 0) {
        for (int i = 0; i < 2 * CONSUMERS; ++i) mbarrier_arrive(&shared.own_full);
        return;
      }
      const int kv_head = work.head % problem.kv_heads, batch = work.head / problem.kv_heads;
      for (int i = 0; i < CONSUMERS; ++i) {
        fetch(shared.k[i], &problem.k, work.row + i * TILE_ROWS, kv_head, batch, &shared.own_full);
        fetch(shared.v[i], &problem.v, work.row + i * TILE_ROWS, kv_head, batch, &shared.own_full);
      }
      const Tiles walk = queries_of(problem, work.row, BLOCK);
      for (int i = 0; i < walk.count * problem.group; ++i, ++visit) {
        const int stage = visit % STAGES;
        const Visit own = visit_of(walk, queue, i);
        const int head = kv_head * problem.group + own.head, row = own.row;
        mbarrier_wait_parity(&shared.empty[stage], visit / STAGES % 2 ^ 1);  // for the stage's last use
        fetch(shared.q[stage], &problem.q, row, head, batch, &shared.full[stage]);
        fetch(shared.dout[stage], &problem.dout, row, head, batch, &shared.full[stage]);
        constexpr int BYTES = TILE_ROWS * sizeof(float);
        const int64_t place = (static_cast<int64_t>(batch) * problem.heads + head) * problem.padded + row;
        mbarrier_arrive_expect_tx(&shared.full[stage], 2 * BYTES);
        bulk_load(shared.lse[stage], problem.lse + place, BYTES, &shared.full[stage]);
        bulk_load(shared.delta[stage], problem.delta + place, BYTES, &shared.full[stage]);
      }
    }
  }

  take_registers<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1;
  const int in_tile = thread / 32 * 16 + thread % 32 / 4;  // the thread's first row
  const uint64_t k_tile = wgmma_tile(shared.k[consumer]), v_tile = wgmma_tile(shared.v[consumer]);
  for (;; ++turn) {
    mbarrier_wait_parity(&shared.own_full, turn % 2);  // for the keys and values
    const Work work = shared.work;
    if (work.head < 0) return;
    const int first_key = work.row + consumer * TILE_ROWS;
    const Tiles walk = queries_of(problem, work.row, BLOCK);
    float dk[WIDTH / 2] = {}, dv[WIDTH / 2] = {};
    for (int i = 0; i < walk.count * problem.group; ++i, ++visit) {
      const int stage = visit % STAGES;
      const Visit own = visit_of(walk, queue, i);
      const int row = own.row;
      const uint64_t q_tile = wgmma_tile(shared.q[stage], TILE_BYTES);
      const uint64_t dout_tile = wgmma_tile(shared.dout[stage], TILE_BYTES);

      float scores[TILE_ROWS / 2], dp[TILE_ROWS / 2];
      mbarrier_wait_parity(&shared.full[stage], visit / STAGES % 2);  // for the stage's queries
      wgmma_fence();
      multiply_rows<T, WIDTH>(scores, k_tile, q_tile);
      wgmma_commit_group();
      multiply_rows<T, WIDTH>(dp, v_tile, dout_tile);
      wgmma_commit_group();
      wgmma_wait_group<1>();  // for the scores
      wgmma_hold(scores);
      if (hides(problem, row, first_key))
        hide_columns(scores, problem, first_key + in_tile, row + thread % 4 * 2);
      exponentiate(scores, shared.lse[stage], problem.factor);
      uint32_t p[TILE_ROWS / 16][4], ds[TILE_ROWS / 16][4];
      round_to<T>(p, scores);
      wgmma_wait_group<0>();  // for dp
      wgmma_hold(dp);
      wgmma_fence();
      multiply_from_registers<T, WIDTH>(dv, p, dout_tile);
      wgmma_commit_group();
      differentiate(scores, dp, shared.delta[stage]);
      round_to<T>(ds, dp);
      store_pairs<T>(shared.ds[stage][consumer], dp);
      fence_proxy_async();                           // shows them to wgmma
      named_barrier_sync(1, CONSUMERS * WARPGROUP);  // for the pairs of both consumers

      float dq[QUADS * 4];
      wgmma_fence();
      multiply_pairs<T, WIDTH>(dq, shared, stage, consumer);
      wgmma_commit_group();
      multiply_from_registers<T, WIDTH>(dk, ds, q_tile);
      wgmma_commit_group();
      wgmma_wait_group<1>();  // for dv and dq
      wgmma_hold(dq);
      wgmma_hold(dv);
#pragma unroll
      for (int j = 0; j < TILE_ROWS / 16; ++j) wgmma_hold(p[j]);
      const int64_t head = static_cast<int64_t>(work.head) * problem.group + own.head;
      const int64_t tile = head * (problem.padded / TILE_ROWS) + own.row / TILE_ROWS;
      const int64_t part = tile * (WIDTH / 64) + (WIDTH == 128 ? consumer : 0);
      float4* const to = sums + part * (PART / 4) + thread;
      mbarrier_wait_parity(&shared.granted[stage], visit / STAGES % 2);  // for the turn
      if (WIDTH == 64 && consumer == 1)
        mbarrier_wait_parity(&shared.half_added[stage], visit / STAGES % 2);  // for the other consumer
#pragma unroll
      for (int j = 0; j < QUADS; ++j)
        reduce_add(to + j * WARPGROUP, {dq[j * 4], dq[j * 4 + 1], dq[j * 4 + 2], dq[j * 4 + 3]});
      if (WIDTH == 64 && consumer == 0) mbarrier_arrive(&shared.half_added[stage]);  // each thread for itself
      mbarrier_arrive(&shared.added[stage]);                                         // likewise
      wgmma_wait_group<0>();                                                         // for dk
      wgmma_hold(dk);
#pragma unroll
      for (int j = 0; j < TILE_ROWS / 16; ++j) wgmma_hold(ds[j]);
      mbarrier_arrive(&shared.empty[stage]);  // each thread for itself: it has read lse and delta
    }
    mbarrier_arrive(&shared.own_empty);  // each thread for itself: all have read `work`
    const int64_t place = static_cast<int64_t>(work.head) * problem.Sk;
    store_rows<T, WIDTH>(problem.dk, dk, problem.scale, place, first_key + in_tile, problem.Sk, problem.D);
    store_rows<T, WIDTH>(problem.dv, dv, 1.0f, place, first_key + in_tile, problem.Sk, problem.D);
  }
#endif
}

// dq from its sums.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(ROUNDING_THREADS)
    attention_backward_v09_deterministic_rounding_kernel(const __grid_constant__ BackwardProblem problem,
                                                         const float4* sums) {
  round_dq<T, WIDTH>(problem, sums);
}

void attention_backward_v09_deterministic(const AttentionBackwardArgs& args) {
  require_narrow_heads(args.D, 128, "v10_dispatch");
  dispatch_heads_of(args.dtype, args.D, [&]<typename T, int WIDTH>() {
    BackwardProblem problem = problem_of(args, cdiv(args.Sq, TILE_ROWS) * TILE_ROWS);
    const int64_t heads = args.B * args.H, numbers = heads * problem.padded * WIDTH;
    float4* sums = nullptr;
    unsigned* turns = nullptr;
    if (numbers > 0) {
      const QueryTerms terms = query_terms<T>(args, problem.padded);
      problem.lse = terms.lse2;
      problem.delta = terms.delta;
      const int64_t bytes = numbers * sizeof(float) + heads * problem.padded / TILE_ROWS * sizeof(unsigned);
      sums = static_cast<float4*>(args.memory->workspace(bytes));
      turns = reinterpret_cast<unsigned*>(sums + numbers / 4);
      CUDA_CHECK(cudaMemsetAsync(sums, 0, bytes, args.stream));
    }
    if (args.B * args.H_KV * args.Sk > 0) {
      // Of queries, their results' gradients and their sums.
      const int64_t bytes = problem.group * args.Sq * args.D * (2 * size_of(args.dtype) + sizeof(float));
      Queue queue =
          queue_of_heads(*args.memory, args.B * args.H_KV, args.Sk, BLOCK, cdiv(args.Sk, BLOCK), 1, bytes);
      weigh(queue, queries_of_key(problem, 0), queries_of_key(problem, problem.Sk - 1));
      const auto kernel = attention_backward_v09_deterministic_kernel<T, WIDTH>;
      allow_shared_memory(kernel, sizeof(Shared<WIDTH>));
      const int grid = std::min(queue.tiles, multiprocessor_count());
      kernel<<<grid, THREADS, sizeof(Shared<WIDTH>), args.stream>>>(problem, queue, sums, turns);
      CUDA_CHECK(cudaGetLastError());
    }
    if (numbers > 0) {
      const unsigned grid = blocks_of(heads, args.Sq, problem.padded * WIDTH / 4 / ROUNDING_THREADS);
      attention_backward_v09_deterministic_rounding_kernel<T, WIDTH>
          <<<grid, ROUNDING_THREADS, 0, args.stream>>>(problem, sums);
      CUDA_CHECK(cudaGetLastError());
    }
  });
}
