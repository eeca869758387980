// attention_backward v04_transposed: scores are computed transposed, so that p and ds stay in registers.
//
// Change:   a warpgroup multiplies its 64 keys by 64 queries, and its values by dout: rows are keys. p and
//           ds then lie in registers just as wgmma wants its first operand for dv and dk. Of both only ds
//           goes to shared memory, for dq, which takes it from there transposed. lse and delta are numbers
//           of columns now, and come with the stage's queries. v03 stored p, too, and read both pairs of
//           tiles from there.
// Why:      at this size of tiles shared memory is busier than the tensor cores: operands in registers are
//           not read from it, and half of the stores fall away.
// Counter:  time stays: what was saved lies between waits, where nothing overlaps yet.
// Requires: as v03.
// Source:   Shah et al., "FlashAttention-3" (2024), hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp, whose
//           SdP_swapAB it is.
// Twin:     none: tl.dot takes both operands from where the compiler puts them.
#include "delta.cuh"
#include "lib/activation.cuh"
#include "lib/head_band.cuh"
#include "lib/head_dispatch.h"
#include "lib/head_sums.cuh"
#include "lib/ptx/reduce.cuh"
#include "problem.h"

constexpr int WARPGROUPS = 2;  // all alike, TILE_ROWS keys each
constexpr int BLOCK = WARPGROUPS * TILE_ROWS;
constexpr int STAGES = 2;
constexpr int THREADS = WARPGROUPS * WARPGROUP;

// WIDTH is D, padded to whole panels.
template <int WIDTH>
struct Shared {
  uint8_t k[WARPGROUPS][WIDTH / 64][TILE_BYTES], v[WARPGROUPS][WIDTH / 64][TILE_BYTES];
  uint8_t q[STAGES][WIDTH / 64][TILE_BYTES], dout[STAGES][WIDTH / 64][TILE_BYTES];
  uint8_t ds[WARPGROUPS][TILE_BYTES];  // [keys, queries]
  float lse[STAGES][TILE_ROWS], delta[STAGES][TILE_ROWS];
  float4 dq[WARPGROUPS][QUADS][WARPGROUP];
  uint64_t own_full, full[STAGES];  // complete when tiles have come
  uint64_t empty[STAGES];           // complete when all warpgroups have multiplied a stage
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Starts a warpgroup's part of ds @ k: of 128 columns it has 64, for all keys; of 64 all, for its own keys.
template <typename T, int WIDTH>
__device__ inline void multiply_pairs(float (&dq)[QUADS * 4], Shared<WIDTH>& shared, int warpgroup) {
#pragma unroll
  for (int i = 0; i < WIDTH / 64; ++i) {
    const int source = WIDTH == 128 ? i : warpgroup;
    const uint64_t ds_tile = wgmma_tile(shared.ds[source]);
    const uint64_t k_panel = wgmma_tile(shared.k[source][WIDTH == 128 ? warpgroup : 0]);
#pragma unroll
    for (int step = 0; step < TILE_ROWS / 16; ++step)
      wgmma_m64k16<64, T, true, false>(dq, ds_tile + step * (16 * ROW_BYTES / 16),
                                       k_panel + step * (16 * ROW_BYTES / 16), i + step > 0);
  }
}

// Turns scores [keys, queries] into p, and dp into ds. lse and delta are those of the tile's queries.
__device__ inline void differentiate_columns(float (&scores)[TILE_ROWS / 2], float (&dp)[TILE_ROWS / 2],
                                             const float (&lse)[TILE_ROWS], const float (&delta)[TILE_ROWS],
                                             float factor) {
#pragma unroll
  for (int j = 0; j < TILE_ROWS / 8; ++j) {
    const int column = j * 8 + threadIdx.x % 4 * 2;
    const float2 own_lse = *reinterpret_cast<const float2*>(&lse[column]);
    const float2 own_delta = *reinterpret_cast<const float2*>(&delta[column]);
#pragma unroll
    for (int i = j * 4; i < j * 4 + 4; ++i) {
      scores[i] = exp2_approx(fmaf(scores[i], factor, -(i % 2 ? own_lse.y : own_lse.x)));
      dp[i] = scores[i] * (dp[i] - (i % 2 ? own_delta.y : own_delta.x));
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// All gradients of BLOCK keys. sums: fp32 [B, heads, tiles of queries, WIDTH / 64, PART], zero at first; the
// sums of dq, not scaled, in the order of QUADS and threads.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    attention_backward_v04_transposed_kernel(const __grid_constant__ BackwardProblem problem, float* sums) {
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
  if (threadIdx.x == 0) {
    mbarrier_init(&shared.own_full, 2 * WARPGROUPS);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 3);
      mbarrier_init(&shared.empty[stage], WARPGROUPS);
    }
    fence_mbarrier_init();
    for (int i = 0; i < WARPGROUPS && visits > 0; ++i) {
      fetch(shared.k[i], &problem.k, block_key + i * TILE_ROWS, kv_head, batch, &shared.own_full);
      fetch(shared.v[i], &problem.v, block_key + i * TILE_ROWS, kv_head, batch, &shared.own_full);
    }
    for (int i = 0; i < min(STAGES, visits); ++i) fetch_queries(i);
  }
  __syncthreads();  // for the barriers

  const int first_key = block_key + warpgroup * TILE_ROWS;
  const int in_tile = thread / 32 * 16 + thread % 32 / 4;  // the thread's first row
  const uint64_t k_tile = wgmma_tile(shared.k[warpgroup]), v_tile = wgmma_tile(shared.v[warpgroup]);
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
    multiply_rows<T, WIDTH>(dp, v_tile, dout_tile);
    wgmma_commit_group();
    wgmma_wait_group<0>();  // for both products
    wgmma_hold(scores);
    wgmma_hold(dp);
    if (hides(problem, row_of(i), first_key))
      hide_columns(scores, problem, first_key + in_tile, row_of(i) + thread % 4 * 2);
    differentiate_columns(scores, dp, shared.lse[stage], shared.delta[stage], problem.factor);
    uint32_t p[TILE_ROWS / 16][4], ds[TILE_ROWS / 16][4];
    round_to<T>(p, scores);
    round_to<T>(ds, dp);
    store_pairs<T>(shared.ds[warpgroup], dp);
    fence_proxy_async();  // shows them to wgmma
    __syncthreads();      // for the pairs of all warpgroups

    float dq[QUADS * 4];
    wgmma_fence();
    multiply_pairs<T, WIDTH>(dq, shared, warpgroup);
    multiply_from_registers<T, WIDTH>(dv, p, dout_tile);
    multiply_from_registers<T, WIDTH>(dk, ds, q_tile);
    wgmma_commit_group();
    if (thread == 0) bulk_wait_group_read<0>();  // for dq's earlier part to have left shared memory
    wgmma_wait_group<0>();                       // for all products
    wgmma_hold(dq);
    wgmma_hold(dv);
    wgmma_hold(dk);
#pragma unroll
    for (int j = 0; j < TILE_ROWS / 16; ++j) {
      wgmma_hold(p[j]);
      wgmma_hold(ds[j]);
    }
    __syncthreads();  // for all reads of pairs, before they are overwritten, and for thread 0's wait
#pragma unroll
    for (int j = 0; j < QUADS; ++j)
      shared.dq[warpgroup][j][thread] = {dq[j * 4], dq[j * 4 + 1], dq[j * 4 + 2], dq[j * 4 + 3]};
    fence_proxy_async();                           // shows them to the copy engine
    named_barrier_sync(1 + warpgroup, WARPGROUP);  // for all threads' sums
    if (thread == 0) {
      const int64_t head = static_cast<int64_t>(batch) * problem.heads + head_of(i);
      const int64_t tile = head * (problem.padded / TILE_ROWS) + row_of(i) / TILE_ROWS;
      const int panel = WIDTH == 128 ? warpgroup : 0;
      bulk_reduce_add(sums + (tile * (WIDTH / 64) + panel) * PART, &shared.dq[warpgroup][0][0].x,
                      PART * sizeof(float));
      bulk_commit_group();
      mbarrier_arrive(&shared.empty[stage]);
    }
    if (threadIdx.x == 0 && i + STAGES < visits) {
      mbarrier_wait_parity(&shared.empty[stage], i / STAGES % 2);  // for all warpgroups
      fetch_queries(i + STAGES);
    }
    __syncwarp();  // thread 0 has diverged
  }
  const int64_t place = static_cast<int64_t>(number) * problem.Sk;
  store_rows<T, WIDTH>(problem.dk, dk, problem.scale, place, first_key + in_tile, problem.Sk, problem.D);
  store_rows<T, WIDTH>(problem.dv, dv, 1.0f, place, first_key + in_tile, problem.Sk, problem.D);
  if (thread == 0) bulk_wait_group_read<0>();  // shared memory ends with the block
#endif
}

// dq from its sums.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(ROUNDING_THREADS)
    attention_backward_v04_transposed_rounding_kernel(const __grid_constant__ BackwardProblem problem,
                                                      const float4* sums) {
  round_dq<T, WIDTH>(problem, sums);
}

void attention_backward_v04_transposed(const AttentionBackwardArgs& args) {
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
      const auto kernel = attention_backward_v04_transposed_kernel<T, WIDTH>;
      allow_shared_memory(kernel, sizeof(Shared<WIDTH>));
      kernel<<<blocks_of(args.B * args.H_KV, args.Sk, cdiv(args.Sk, BLOCK)), THREADS, sizeof(Shared<WIDTH>),
               args.stream>>>(problem, sums);
      CUDA_CHECK(cudaGetLastError());
    }
    if (numbers > 0) {
      const unsigned grid = blocks_of(heads, args.Sq, problem.padded * WIDTH / 4 / ROUNDING_THREADS);
      attention_backward_v04_transposed_rounding_kernel<T, WIDTH>
          <<<grid, ROUNDING_THREADS, 0, args.stream>>>(problem, reinterpret_cast<const float4*>(sums));
      CUDA_CHECK(cudaGetLastError());
    }
  });
}
