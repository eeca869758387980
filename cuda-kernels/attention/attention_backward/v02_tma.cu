// attention_backward v02_tma: TMA brings whole tiles, and wgmma multiplies them where they lie.
//
// Change:   one thread starts the copies of tiles by the tensor memory accelerator (TMA, the copy engine),
//           into two stages, and mbarriers say when they have arrived. In the kernel of keys a warpgroup,
//           four warps together, owns 64 keys: it multiplies 64 queries by them, and stores p and ds to
//           shared memory, from where wgmma takes them transposed. In the kernel of queries it owns 64
//           queries, and ds stays in registers as wgmma's first operand. v01's warps loaded fragments for
//           mma.sync.
// Why:      no other instruction than wgmma reaches the tensor cores' full rate. The copy engine takes
//           care of addresses, edges and swizzle. A tile of queries serves as both operands that it is
//           needed as: its rows run along D, and wgmma reads them along either dimension.
// Counter:  instructions and time fall; tensor_pipe rises.
// Requires: compute capability 9.0 with its own features (sm_90a); bf16 or fp16; D up to 128; D and
//           strides that are multiples of 8 elements, starts that are multiples of 16 bytes. Others are
//           refused.
// Source:   PTX ISA, "wgmma.mma_async" and "cp.async.bulk.tensor"; Shah et al., "FlashAttention-3" (2024).
// Twin:     triton-kernels/attention/attention_backward/v02_tma.py
#include "delta.cuh"
#include "lib/activation.cuh"
#include "lib/head_band.cuh"
#include "lib/head_dispatch.h"
#include "problem.h"

constexpr int WARPGROUPS = 2;  // all alike, TILE_ROWS rows of the block's own each
constexpr int BLOCK = WARPGROUPS * TILE_ROWS;
constexpr int STAGES = 2;
constexpr int THREADS = WARPGROUPS * WARPGROUP;

// WIDTH is D, padded to whole panels.
template <int WIDTH>
using Tile = uint8_t[WIDTH / 64][TILE_BYTES];

template <int WIDTH>
struct KeysShared {
  Tile<WIDTH> k[WARPGROUPS], v[WARPGROUPS];
  Tile<WIDTH> q[STAGES], dout[STAGES];
  uint8_t p[WARPGROUPS][TILE_BYTES], ds[WARPGROUPS][TILE_BYTES];  // [queries, keys]
  uint64_t own_full, full[STAGES];                                // complete when tiles have come
  uint64_t empty[STAGES];  // complete when all warpgroups have multiplied a stage
};

template <int WIDTH>
struct QueriesShared {
  Tile<WIDTH> q[WARPGROUPS], dout[WARPGROUPS];
  Tile<WIDTH> k[STAGES], v[STAGES];
  uint64_t own_full, full[STAGES], empty[STAGES];
};

// Those of keys of which some are seen by one of a block's queries.
__device__ inline Tiles keys_of(const BackwardProblem& problem, int first_row, int block_m) {
  const int last_row = min(first_row + block_m, problem.Sq) - 1;
  return tiles_of(max(first_row + problem.first, 0), min(last_row + problem.last, problem.Sk - 1));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Starts sums += a^T @ b for a tile of pairs a [queries, keys] and a tile b [queries, WIDTH].
template <typename T, int WIDTH>
__device__ inline void multiply_columns(float (&sums)[WIDTH / 2], uint64_t a, uint64_t b) {
#pragma unroll
  for (int step = 0; step < TILE_ROWS / 16; ++step) {
    const int at = step * (16 * ROW_BYTES / 16);
    wgmma_m64k16<WIDTH, T, true, false>(sums, a + at, b + at, true);
  }
}

// Hides keys outside the band, and beyond the last one. `row` and `key` are those of the thread's first
// score.
__device__ inline void hide(float (&scores)[TILE_ROWS / 2], const BackwardProblem& problem, int row,
                            int key) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 2; ++i) {
    const int in_row = row + i % 4 / 2 * 8;
    const int low = in_row + problem.first - key;
    const int high = min(in_row + problem.last, problem.Sk - 1) - key;
    const int at = i / 4 * 8 + i % 2;
    if (at < low || at > high) scores[i] = problem.factor < 0 ? INFINITY : -INFINITY;
  }
}

// Turns scores into p, and dp, the products of dout and v, into ds. lse and delta are those of the thread's
// rows.
__device__ inline void differentiate(float (&scores)[TILE_ROWS / 2], float (&dp)[TILE_ROWS / 2],
                                     const float (&lse)[2], const float (&delta)[2], float factor) {
#pragma unroll
  for (int i = 0; i < TILE_ROWS / 2; ++i) {
    scores[i] = exp2_approx(fmaf(scores[i], factor, -lse[i % 4 / 2]));
    dp[i] = scores[i] * (dp[i] - delta[i % 4 / 2]);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// One thread makes the barriers of a block that waits for `own` tiles once, and for two in each stage.
template <typename Shared>
__device__ inline void init_barriers(Shared& shared, int own) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  mbarrier_init(&shared.own_full, own);
  for (int stage = 0; stage < STAGES; ++stage) {
    mbarrier_init(&shared.full[stage], 2);
    mbarrier_init(&shared.empty[stage], WARPGROUPS);
  }
  fence_mbarrier_init();
#endif
}

// dk and dv of BLOCK keys, from all queries that see them.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    attention_backward_v02_tma_kernel(const __grid_constant__ BackwardProblem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic[];
  KeysShared<WIDTH>& shared = *reinterpret_cast<KeysShared<WIDTH>*>(dynamic);
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
  };
  if (threadIdx.x == 0) {
    init_barriers(shared, 2 * WARPGROUPS);
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
  const uint64_t p_tile = wgmma_tile(shared.p[warpgroup]), ds_tile = wgmma_tile(shared.ds[warpgroup]);
  float dk[WIDTH / 2] = {}, dv[WIDTH / 2] = {};
  if (visits > 0) mbarrier_wait_parity(&shared.own_full, 0);  // for the keys and values
  for (int i = 0; i < visits; ++i) {
    const int stage = i % STAGES;
    const int row = row_of(i) + in_tile;
    const int64_t place = (static_cast<int64_t>(batch) * problem.heads + head_of(i)) * problem.padded + row;
    const float lse[2] = {problem.lse[place], problem.lse[place + 8]};
    const float delta[2] = {problem.delta[place], problem.delta[place + 8]};
    const uint64_t q_tile = wgmma_tile(shared.q[stage], TILE_BYTES);
    const uint64_t dout_tile = wgmma_tile(shared.dout[stage], TILE_BYTES);

    float scores[TILE_ROWS / 2], dp[TILE_ROWS / 2];
    mbarrier_wait_parity(&shared.full[stage], i / STAGES % 2);  // for the stage's queries
    wgmma_fence();
    multiply_rows<T, WIDTH>(scores, q_tile, k_tile);
    multiply_rows<T, WIDTH>(dp, dout_tile, v_tile);
    wgmma_commit_group();
    wgmma_wait_group<0>();  // for both products
    wgmma_hold(scores);
    wgmma_hold(dp);
    if (hides(problem, row_of(i), first_key)) hide(scores, problem, row, first_key + thread % 4 * 2);
    differentiate(scores, dp, lse, delta, problem.factor);
    store_pairs<T>(shared.p[warpgroup], scores);
    store_pairs<T>(shared.ds[warpgroup], dp);
    fence_proxy_async();                           // shows them to wgmma
    named_barrier_sync(1 + warpgroup, WARPGROUP);  // for all of the warpgroup's pairs

    wgmma_fence();
    multiply_columns<T, WIDTH>(dv, p_tile, dout_tile);
    multiply_columns<T, WIDTH>(dk, ds_tile, q_tile);
    wgmma_commit_group();
    wgmma_wait_group<0>();  // for both, before their operands are overwritten
    wgmma_hold(dv);
    wgmma_hold(dk);
    if (thread == 0) mbarrier_arrive(&shared.empty[stage]);
    if (threadIdx.x == 0 && i + STAGES < visits) {
      mbarrier_wait_parity(&shared.empty[stage], i / STAGES % 2);  // for all warpgroups
      fetch_queries(i + STAGES);
    }
    __syncwarp();  // thread 0 has diverged
  }
  const int64_t place = static_cast<int64_t>(number) * problem.Sk;
  store_rows<T, WIDTH>(problem.dk, dk, problem.scale, place, first_key + in_tile, problem.Sk, problem.D);
  store_rows<T, WIDTH>(problem.dv, dv, 1.0f, place, first_key + in_tile, problem.Sk, problem.D);
#endif
}

// dq of BLOCK queries, from all keys that they see.
template <typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    attention_backward_v02_tma_queries_kernel(const __grid_constant__ BackwardProblem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic[];
  QueriesShared<WIDTH>& shared = *reinterpret_cast<QueriesShared<WIDTH>*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int thread = threadIdx.x % WARPGROUP;
  const int blocks = (problem.Sq + BLOCK - 1) / BLOCK;
  const int number = blockIdx.x / blocks;  // of the head, over all batches
  const int head = number % problem.heads, batch = number / problem.heads;
  const int kv_head = head / problem.group;
  const int block_row = blockIdx.x % blocks * BLOCK;
  const Tiles walk = keys_of(problem, block_row, BLOCK);

  const auto fetch_keys = [&](int i) {
    const int stage = i % STAGES;
    fetch(shared.k[stage], &problem.k, (walk.first + i) * TILE_ROWS, kv_head, batch, &shared.full[stage]);
    fetch(shared.v[stage], &problem.v, (walk.first + i) * TILE_ROWS, kv_head, batch, &shared.full[stage]);
  };
  if (threadIdx.x == 0) {
    init_barriers(shared, 2 * WARPGROUPS);
    for (int i = 0; i < WARPGROUPS && walk.count > 0; ++i) {
      fetch(shared.q[i], &problem.q, block_row + i * TILE_ROWS, head, batch, &shared.own_full);
      fetch(shared.dout[i], &problem.dout, block_row + i * TILE_ROWS, head, batch, &shared.own_full);
    }
    for (int i = 0; i < min(STAGES, walk.count); ++i) fetch_keys(i);
  }
  __syncthreads();  // for the barriers

  const int first_row = block_row + warpgroup * TILE_ROWS;
  const int row = first_row + thread / 32 * 16 + thread % 32 / 4;
  const int64_t place = static_cast<int64_t>(number) * problem.padded + row;
  const float lse[2] = {problem.lse[place], problem.lse[place + 8]};
  const float delta[2] = {problem.delta[place], problem.delta[place + 8]};
  const uint64_t q_tile = wgmma_tile(shared.q[warpgroup]), dout_tile = wgmma_tile(shared.dout[warpgroup]);
  float dq[WIDTH / 2] = {};
  if (walk.count > 0) mbarrier_wait_parity(&shared.own_full, 0);  // for the queries and dout
  for (int i = 0; i < walk.count; ++i) {
    const int stage = i % STAGES;
    const int first_key = (walk.first + i) * TILE_ROWS;
    const uint64_t k_tile = wgmma_tile(shared.k[stage], TILE_BYTES);

    float scores[TILE_ROWS / 2], dp[TILE_ROWS / 2];
    mbarrier_wait_parity(&shared.full[stage], i / STAGES % 2);  // for the stage's keys and values
    wgmma_fence();
    multiply_rows<T, WIDTH>(scores, q_tile, k_tile);
    multiply_rows<T, WIDTH>(dp, dout_tile, wgmma_tile(shared.v[stage]));
    wgmma_commit_group();
    wgmma_wait_group<0>();  // for both products
    wgmma_hold(scores);
    wgmma_hold(dp);
    if (hides(problem, first_row, first_key)) hide(scores, problem, row, first_key + thread % 4 * 2);
    differentiate(scores, dp, lse, delta, problem.factor);
    uint32_t ds[TILE_ROWS / 16][4];
    round_to<T>(ds, dp);

    wgmma_fence();
    multiply_from_registers<T, WIDTH>(dq, ds, k_tile);
    wgmma_commit_group();
    wgmma_wait_group<0>();  // for the product, before its operands are overwritten
    wgmma_hold(dq);
#pragma unroll
    for (int step = 0; step < TILE_ROWS / 16; ++step) wgmma_hold(ds[step]);
    if (thread == 0) mbarrier_arrive(&shared.empty[stage]);
    if (threadIdx.x == 0 && i + STAGES < walk.count) {
      mbarrier_wait_parity(&shared.empty[stage], i / STAGES % 2);  // for all warpgroups
      fetch_keys(i + STAGES);
    }
    __syncwarp();  // thread 0 has diverged
  }
  store_rows<T, WIDTH>(problem.dq, dq, problem.scale, static_cast<int64_t>(number) * problem.Sq, row,
                       problem.Sq, problem.D);
#endif
}

void attention_backward_v02_tma(const AttentionBackwardArgs& args) {
  require_narrow_heads(args.D, 128, "v10_dispatch");
  dispatch_heads_of(args.dtype, args.D, [&]<typename T, int WIDTH>() {
    BackwardProblem problem = problem_of(args, cdiv(args.Sq, BLOCK) * BLOCK);
    if (args.B * args.H * args.Sq > 0) {
      const QueryTerms terms = query_terms<T>(args, problem.padded);
      problem.lse = terms.lse2;
      problem.delta = terms.delta;
      const auto kernel = attention_backward_v02_tma_queries_kernel<T, WIDTH>;
      allow_shared_memory(kernel, sizeof(QueriesShared<WIDTH>));
      kernel<<<blocks_of(args.B * args.H, args.Sq, cdiv(args.Sq, BLOCK)), THREADS,
               sizeof(QueriesShared<WIDTH>), args.stream>>>(problem);
      CUDA_CHECK(cudaGetLastError());
    }
    if (args.B * args.H_KV * args.Sk > 0) {
      const auto kernel = attention_backward_v02_tma_kernel<T, WIDTH>;
      allow_shared_memory(kernel, sizeof(KeysShared<WIDTH>));
      kernel<<<blocks_of(args.B * args.H_KV, args.Sk, cdiv(args.Sk, BLOCK)), THREADS,
               sizeof(KeysShared<WIDTH>), args.stream>>>(problem);
      CUDA_CHECK(cudaGetLastError());
    }
  });
}
