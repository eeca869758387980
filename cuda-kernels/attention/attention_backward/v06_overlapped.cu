// attention_backward v06_overlapped: each product starts as soon as its operands are there, and waits come
// late.
//
// Change:   exponentials are taken under the products of dout and v, ds is computed under dv's, and a part
//           of dq leaves under dk's: a consumer waits for one product while the next one runs. In v05 all
//           products of a phase were waited for at once.
// Why:      tensor cores stand still while both consumers compute exponentials, or store pairs. Three of
//           five products now have something else under them.
// Counter:  time falls; tensor_pipe rises; instructions stay.
// Requires: as v03.
// Source:   Shah et al., "FlashAttention-3" (2024), whose order of products it is; here dv's starts before
//           ds is computed.
// Twin:     triton-kernels/attention/attention_backward/v06_overlapped.py
#include "delta.cuh"
#include "lib/activation.cuh"
#include "lib/head_band.cuh"
#include "lib/head_dispatch.h"
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
  float4 dq[CONSUMERS][QUADS][WARPGROUP];
  uint64_t own_full, full[STAGES];  // complete when tiles have come
  uint64_t empty[STAGES];           // complete when all consumers have multiplied a stage
  uint64_t dq_full[CONSUMERS];      // complete when a consumer's part of dq is there
  uint64_t dq_empty[CONSUMERS];     // complete when it has left again
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

// All gradients of BLOCK keys. sums: fp32 [B, heads, tiles of queries, WIDTH / 64, PART], zero at first; the
// sums of dq, not scaled, in the order of QUADS and threads.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    attention_backward_v06_overlapped_kernel(const __grid_constant__ BackwardProblem problem, float* sums) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared<WIDTH>& shared = *reinterpret_cast<Shared<WIDTH>*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int thread = threadIdx.x % WARPGROUP;
  const int blocks = (problem.Sk + BLOCK - 1) / BLOCK;
  const int number = blockIdx.x / blocks;  // of the head of keys, over all batches
  const int kv_head = number % problem.kv_heads, batch = number / problem.kv_heads;
  const int block_key = blockIdx.x % blocks * BLOCK;
  const Tiles walk = queries_of(problem, block_key, BLOCK);
  const int visits = walk.count * problem.group;

  const auto head_of = [&](int i) { return kv_head * problem.group + i / walk.count; };
  const auto row_of = [&](int i) { return (walk.first + i % walk.count) * TILE_ROWS; };
  const auto fetch_queries = [&](int i) {
    const int stage = i % STAGES;
    fetch(shared.q[stage], &problem.q, row_of(i), head_of(i), batch, &shared.full[stage]);
    fetch(shared.dout[stage], &problem.dout, row_of(i), head_of(i), batch, &shared.full[stage]);
    constexpr int BYTES = TILE_ROWS * sizeof(float);
    const int64_t head = static_cast<int64_t>(batch) * problem.heads + head_of(i);
    const int64_t place = head * problem.padded + row_of(i);
    mbarrier_arrive_expect_tx(&shared.full[stage], 2 * BYTES);
    bulk_load(shared.lse[stage], problem.lse + place, BYTES, &shared.full[stage]);
    bulk_load(shared.delta[stage], problem.delta + place, BYTES, &shared.full[stage]);
  };
  const auto quads_of = [&](int i, int consumer) {  // of dq, in global memory
    const int64_t head = static_cast<int64_t>(batch) * problem.heads + head_of(i);
    const int64_t tile = head * (problem.padded / TILE_ROWS) + row_of(i) / TILE_ROWS;
    return sums + (tile * (WIDTH / 64) + (WIDTH == 128 ? consumer : 0)) * PART;
  };
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.own_full, 2 * CONSUMERS);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 3);
      mbarrier_init(&shared.empty[stage], CONSUMERS * WARPGROUP);
    }
    for (int i = 0; i < CONSUMERS; ++i) {
      mbarrier_init(&shared.dq_full[i], WARPGROUP);
      mbarrier_init(&shared.dq_empty[i], 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // for the barriers

  if (warpgroup == 0) {
    give_back_registers<PRODUCER_REGISTERS>();
    if (thread == 0) {  // fetches tiles
      for (int i = 0; i < CONSUMERS && visits > 0; ++i) {
        fetch(shared.k[i], &problem.k, block_key + i * TILE_ROWS, kv_head, batch, &shared.own_full);
        fetch(shared.v[i], &problem.v, block_key + i * TILE_ROWS, kv_head, batch, &shared.own_full);
      }
      for (int i = 0; i < visits; ++i) {
        mbarrier_wait_parity(&shared.empty[i % STAGES], i / STAGES % 2 ^ 1);  // for the stage's last use
        fetch_queries(i);
      }
    } else if (thread == 32) {  // adds parts of dq
      for (int i = 0; i < visits; ++i) {
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
          mbarrier_wait_parity(&shared.dq_full[consumer], i % 2);  // for the consumer's part
          bulk_reduce_add(quads_of(i, consumer), &shared.dq[consumer][0][0].x, PART * sizeof(float));
          bulk_commit_group();
          bulk_wait_group_read<0>();  // for it to have left shared memory
          mbarrier_arrive(&shared.dq_empty[consumer]);
        }
      }
    }
    return;
  }
  take_registers<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1;
  const int first_key = block_key + consumer * TILE_ROWS;
  const int in_tile = thread / 32 * 16 + thread % 32 / 4;  // the thread's first row
  const uint64_t k_tile = wgmma_tile(shared.k[consumer]), v_tile = wgmma_tile(shared.v[consumer]);
  float dk[WIDTH / 2] = {}, dv[WIDTH / 2] = {};
  if (visits > 0) mbarrier_wait_parity(&shared.own_full, 0);  // for the keys and values
  for (int i = 0; i < visits; ++i) {
    const int stage = i % STAGES;
    const uint64_t q_tile = wgmma_tile(shared.q[stage], TILE_BYTES);
    const uint64_t dout_tile = wgmma_tile(shared.dout[stage], TILE_BYTES);

    float scores[TILE_ROWS / 2], dp[TILE_ROWS / 2];
    mbarrier_wait_parity(&shared.full[stage], i / STAGES % 2);  // for the stage's queries
    wgmma_fence();
    multiply_rows<T, WIDTH>(scores, k_tile, q_tile);
    wgmma_commit_group();
    multiply_rows<T, WIDTH>(dp, v_tile, dout_tile);
    wgmma_commit_group();
    wgmma_wait_group<1>();  // for the scores
    wgmma_hold(scores);
    if (hides(problem, row_of(i), first_key))
      hide_columns(scores, problem, first_key + in_tile, row_of(i) + thread % 4 * 2);
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
    mbarrier_wait_parity(&shared.dq_empty[consumer], i % 2 ^ 1);  // for dq's earlier part to have left
#pragma unroll
    for (int j = 0; j < QUADS; ++j)
      shared.dq[consumer][j][thread] = {dq[j * 4], dq[j * 4 + 1], dq[j * 4 + 2], dq[j * 4 + 3]};
    fence_proxy_async();  // shows them to the copy engine
    mbarrier_arrive(&shared.dq_full[consumer]);
    wgmma_wait_group<0>();  // for dk
    wgmma_hold(dk);
#pragma unroll
    for (int j = 0; j < TILE_ROWS / 16; ++j) wgmma_hold(ds[j]);
    mbarrier_arrive(&shared.empty[stage]);  // each thread for itself: it has read lse and delta
  }
  const int64_t place = static_cast<int64_t>(number) * problem.Sk;
  store_rows<T, WIDTH>(problem.dk, dk, problem.scale, place, first_key + in_tile, problem.Sk, problem.D);
  store_rows<T, WIDTH>(problem.dv, dv, 1.0f, place, first_key + in_tile, problem.Sk, problem.D);
#endif
}

// dq from its sums.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(ROUNDING_THREADS)
    attention_backward_v06_overlapped_rounding_kernel(const __grid_constant__ BackwardProblem problem,
                                                      const float4* sums) {
  round_dq<T, WIDTH>(problem, sums);
}

void attention_backward_v06_overlapped(const AttentionBackwardArgs& args) {
  require_narrow_heads(args.D, 128, "v10_dispatch");
  dispatch_heads_of(args.dtype, args.D, [&]<typename T, int WIDTH>() {
    BackwardProblem problem = problem_of(args, cdiv(args.Sq, TILE_ROWS) * TILE_ROWS);
    const int64_t heads = args.B * args.H, numbers = heads * problem.padded * WIDTH;
    float* sums = nullptr;
    if (numbers > 0) {
      const QueryTerms terms = query_terms<T>(args, problem.padded);
      problem.lse = terms.lse2;
      problem.delta = terms.delta;
      sums = static_cast<float*>(args.memory->workspace(numbers * sizeof(float)));
      CUDA_CHECK(cudaMemsetAsync(sums, 0, numbers * sizeof(float), args.stream));
    }
    if (args.B * args.H_KV * args.Sk > 0) {
      const auto kernel = attention_backward_v06_overlapped_kernel<T, WIDTH>;
      allow_shared_memory(kernel, sizeof(Shared<WIDTH>));
      kernel<<<blocks_of(args.B * args.H_KV, args.Sk, cdiv(args.Sk, BLOCK)), THREADS, sizeof(Shared<WIDTH>),
               args.stream>>>(problem, sums);
      CUDA_CHECK(cudaGetLastError());
    }
    if (numbers > 0) {
      const unsigned grid = blocks_of(heads, args.Sq, problem.padded * WIDTH / 4 / ROUNDING_THREADS);
      attention_backward_v06_overlapped_rounding_kernel<T, WIDTH>
          <<<grid, ROUNDING_THREADS, 0, args.stream>>>(problem, reinterpret_cast<const float4*>(sums));
      CUDA_CHECK(cudaGetLastError());
    }
  });
}
