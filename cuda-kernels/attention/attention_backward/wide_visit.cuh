// What v10's consumers do with a stage of queries where they share the keys, and have half the columns each:
// D from 136 to 256.
#pragma once

#include "lib/ptx/wgmma_narrow.cuh"
#include "visit.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int HALF_ROWS = TILE_ROWS / CONSUMERS;  // queries of which a consumer computes the pairs
constexpr int HALF_PAIRS = HALF_ROWS / 2;         // of a thread

// Starts sums = a @ b^T for a tile a of TILE_ROWS keys and HALF_ROWS rows b of queries.
template <typename T>
__device__ inline void multiply_half(float (&sums)[HALF_PAIRS], uint64_t a, uint64_t b) {
#pragma unroll
  for (int step = 0; step < 256 / 16; ++step) {
    const int at = step / 4 * (TILE_BYTES / 16) + step % 4 * 2;  // 16 columns, in units of 16 bytes
    wgmma_m64k16_narrow<HALF_ROWS, T, false>(sums, a + at, b + at, step > 0);
  }
}

// Stores rounded pairs as store_pairs does, a consumer's half of a tile's columns.
template <typename T>
__device__ inline void store_half(uint8_t (&tile)[TILE_BYTES], const float (&values)[HALF_PAIRS],
                                  int consumer) {
  const int thread = threadIdx.x % WARPGROUP, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < HALF_PAIRS; i += 2) {
    const int piece = (consumer * HALF_ROWS / 8 + i / 4) ^ row % 8;
    uint8_t* at = tile + (row + i % 4 / 2 * 8) * ROW_BYTES + piece * 16 + thread % 4 * 4;
    *reinterpret_cast<uint32_t*>(at) = rounded_pair<T>(values[i], values[i + 1]);
  }
}

// Starts sums += pairs @ rows for a tile of pairs [keys, queries] and 128 columns of rows of queries.
template <typename T>
__device__ inline void multiply_stored(float (&sums)[64], uint64_t pairs, uint64_t rows) {
#pragma unroll
  for (int step = 0; step < TILE_ROWS / 16; ++step)
    wgmma_m64k16<128, T, false, false>(sums, pairs + step * 2, rows + step * (16 * ROW_BYTES / 16), true);
}

// A consumer's part of a visit: the pairs of half the queries, then products of all pairs with half the
// columns. Starts what is added to dk, dv and dq; the group of dk and dv comes behind that of dq. `row` is
// the first of the stage's queries. Pairs have two stages: a consumer may write the next ones while the other
// one's products still read these.
template <typename T, Wanted WANTED>
__device__ inline void visit_together(float (&dk)[64], float (&dv)[64], float (&dq)[64], Shared<256>& shared,
                                      const AnyBackwardProblem& problem, const KeyTask& task, int own_stage,
                                      uint32_t visit, int row, int consumer) {
  const int thread = threadIdx.x % WARPGROUP, in_tile = thread / 32 * 16 + thread % 32 / 4;  // its first key
  const int first_row = row + consumer * HALF_ROWS;
  const int stage = visit % Tile<256>::STAGES;
  constexpr int HALF = HALF_ROWS * ROW_BYTES / 16;  // in descriptors' units
  uint8_t (&p_tile)[TILE_BYTES] = shared.pairs[visit % PAIR_STAGES][0][0];
  uint8_t (&ds_tile)[TILE_BYTES] = shared.pairs[visit % PAIR_STAGES][0][1];
  float scores[HALF_PAIRS], dp[HALF_PAIRS];
  wgmma_fence();
  multiply_half<T>(scores, wgmma_tile(shared.k[own_stage][0]),
                   wgmma_tile(shared.q[stage][0]) + consumer * HALF);
  wgmma_commit_group();
  if constexpr (WANTED.ds()) {
    multiply_half<T>(dp, wgmma_tile(shared.v[own_stage][0]),
                     wgmma_tile(shared.dout[stage][0]) + consumer * HALF);
    wgmma_commit_group();
  }
  wgmma_wait_group<WANTED.ds()>();  // for the scores
  wgmma_hold(scores);
  const bool masked = hides(task, row, task.key);
  const int first_pair[2] = {task.key + in_tile, first_row + thread % 4 * 2};
  if constexpr (WANTED.capped) {
#pragma unroll
    for (int j = 0; j < HALF_PAIRS; ++j) scores[j] = tanh_by_exp2(scores[j] * problem.cap);
    if (masked) hide_columns(scores, task, first_pair[0], first_pair[1]);
  }
  const float* lse = shared.lse[stage][0] + consumer * HALF_ROWS;
  float p[HALF_PAIRS];
  for_each_pair<HALF_PAIRS>(
      lse, [&](int i, float own) { p[i] = exp2_approx(fmaf(scores[i], problem.factor, -own)); });
  if constexpr (!WANTED.capped) {
    // Behind the exponentials, this branch keeps ptxas from moving the wait for dp above them.
    if (masked) hide_pairs(p, task, 0.0f, first_pair[0], first_pair[1]);
  }
  if constexpr (WANTED.dv) store_half<T>(p_tile, p, consumer);
  if constexpr (WANTED.ds()) {
    wgmma_wait_group<0>();  // for dp
    wgmma_hold(dp);
    for_each_pair<HALF_PAIRS>(shared.delta[stage][0] + consumer * HALF_ROWS, [&](int i, float own) {
      dp[i] = p[i] * (dp[i] - own);
      // A score of inf is a hidden pair's.
      if constexpr (WANTED.capped) dp[i] *= isinf(scores[i]) ? 0.0f : fmaf(-scores[i], scores[i], 1.0f);
    });
    store_half<T>(ds_tile, dp, consumer);
  }
  fence_proxy_async();                                       // shows them to wgmma
  named_barrier_sync(PAIRS_BARRIER, CONSUMERS * WARPGROUP);  // for the pairs of both consumers

  const int panel = consumer * Tile<256>::DQ_PANELS;
  wgmma_fence();
  if constexpr (WANTED.dq) {
    const uint64_t keys = wgmma_tile(shared.k[own_stage][0][panel], TILE_BYTES);
#pragma unroll
    for (int step = 0; step < TILE_ROWS / 16; ++step)
      wgmma_m64k16<128, T, true, false>(dq, wgmma_tile(ds_tile) + step * (16 * ROW_BYTES / 16),
                                        keys + step * (16 * ROW_BYTES / 16), step > 0);
    wgmma_commit_group();
  }
  if constexpr (WANTED.dv)
    multiply_stored<T>(dv, wgmma_tile(p_tile), wgmma_tile(shared.dout[stage][0][panel], TILE_BYTES));
  if constexpr (WANTED.dk)
    multiply_stored<T>(dk, wgmma_tile(ds_tile), wgmma_tile(shared.q[stage][0][panel], TILE_BYTES));
  wgmma_commit_group();
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
