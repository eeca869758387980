// What v10's consumers do with a stage of queries, where each has its own keys: D up to 128.
#pragma once

#include "lib/activation.cuh"
#include "lib/head_sums.cuh"
#include "lib/tanh.cuh"
#include "task.cuh"

constexpr int CONSUMERS = 2;    // warpgroups that compute
constexpr int PAIR_STAGES = 2;  // a consumer may be a visit ahead of the other one's products
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;  // the first one moves data
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;
constexpr int PAIRS_BARRIER = 1 + CONSUMERS;  // behind those of clear_rows

static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "no more than the block starts with, or a warpgroup waits for ever");

// WIDTH is D, padded to whole panels of 64 columns.
template <int WIDTH>
struct Tile {
  static constexpr bool WIDE = WIDTH > 128;
  static constexpr int PARTS = WIDTH == 64 ? CONSUMERS : 1;  // tiles of TILE_ROWS queries in a stage
  static constexpr int KEY_TILES = WIDE ? 1 : CONSUMERS;     // of TILE_ROWS keys: each consumer's, or both's
  static constexpr int STAGES = WIDTH == 128 ? 3 : 2;        // of queries
  static constexpr int OWN_STAGES = WIDTH == 64 ? 2 : 1;     // of keys and values
  static constexpr int TASKS = OWN_STAGES + 1;               // one is set while others may still be read
  static constexpr int BLOCK_M = PARTS * TILE_ROWS;
  static constexpr int BLOCK_N = KEY_TILES * TILE_ROWS;
  static constexpr int PANELS = WIDTH / 64;
  static constexpr int DQ_PANELS = WIDE ? PANELS / CONSUMERS : 1;   // to which a consumer adds
  static constexpr int COLUMNS = WIDE ? WIDTH / CONSUMERS : WIDTH;  // of dk and dv that a consumer has
};

// What a kernel computes. `turns`: blocks add to dq one after the other. `capped`: scores have a softcap.
struct Wanted {
  bool dq, dk, dv, turns, capped;
  constexpr bool ds() const { return dq || dk; }
};

template <int WIDTH>
struct Shared {
  using Tile = ::Tile<WIDTH>;
  uint8_t k[Tile::OWN_STAGES][Tile::KEY_TILES][Tile::PANELS][TILE_BYTES];
  uint8_t v[Tile::OWN_STAGES][Tile::KEY_TILES][Tile::PANELS][TILE_BYTES];
  uint8_t q[Tile::STAGES][Tile::PARTS][Tile::PANELS][TILE_BYTES];
  uint8_t dout[Tile::STAGES][Tile::PARTS][Tile::PANELS][TILE_BYTES];
  // [keys, queries]: both consumers' ds; WIDE: p, ds.
  uint8_t pairs[PAIR_STAGES][Tile::PARTS][CONSUMERS][TILE_BYTES];
  float lse[Tile::STAGES][Tile::PARTS][TILE_ROWS], delta[Tile::STAGES][Tile::PARTS][TILE_ROWS];
  uint64_t own_full[Tile::OWN_STAGES];   // complete when keys have come, and a task says which
  uint64_t own_empty[Tile::OWN_STAGES];  // when all who read them are done with both
  uint64_t full[Tile::STAGES];           // when queries have come
  uint64_t empty[Tile::STAGES];          // when all consumers have multiplied them
  uint64_t granted[Tile::STAGES];        // when it is the block's turn to add to dq
  uint64_t passed[Tile::STAGES];         // when who passes the turn on knows that it has been used
  uint64_t added[Tile::STAGES];          // when both consumers have added
  KeyTask task[Tile::TASKS];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Starts a consumer's part of ds @ k: of 128 columns it has 64, of the one tile of queries; of 64 all, of its
// own tile.
template <typename T, int WIDTH>
__device__ inline void multiply_pairs(float (&dq)[QUADS * 4], Shared<WIDTH>& shared, int own_stage,
                                      uint32_t visit, int consumer) {
#pragma unroll
  for (int i = 0; i < CONSUMERS; ++i) {
    const uint64_t ds_tile = wgmma_tile(shared.pairs[visit % PAIR_STAGES][WIDTH == 64 ? consumer : 0][i]);
    const uint64_t k_panel = wgmma_tile(shared.k[own_stage][i][WIDTH == 64 ? 0 : consumer]);
#pragma unroll
    for (int step = 0; step < TILE_ROWS / 16; ++step)
      wgmma_m64k16<64, T, true, false>(dq, ds_tile + step * (16 * ROW_BYTES / 16),
                                       k_panel + step * (16 * ROW_BYTES / 16), i + step > 0);
  }
}

// Calls function(i, value) for each of a thread's N pairs [keys, queries], with its query's value.
template <int N, typename Function>
__device__ inline void for_each_pair(const float* values, Function function) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    const float2 own = *reinterpret_cast<const float2*>(&values[j * 8 + threadIdx.x % 4 * 2]);
#pragma unroll
    for (int i = j * 4; i < j * 4 + 4; ++i) function(i, i % 2 ? own.y : own.x);
  }
}

// Rounds p of capped scores, which stay.
template <typename T, int N>
__device__ inline void exponentiate(uint32_t (&p)[N / 8][4], const float (&scores)[N], const float* lse,
                                    float factor) {
  float before = 0.0f;
  for_each_pair<N>(lse, [&](int i, float own) {
    const float power = exp2_approx(fmaf(scores[i], factor, -own));
    if (i % 2) p[i / 8][i % 8 / 2] = rounded_pair<T>(before, power);
    before = power;
  });
}

// Turns dp into ds. Without a softcap `scores` are p; delta, and with a softcap lse, those of the tile's
// queries.
template <bool CAPPED, int N>
__device__ inline void differentiate(const float (&scores)[N], float (&dp)[N], const float* lse,
                                     const float* delta, float factor) {
  for_each_pair<N>(delta, [&](int i, float own) {
    dp[i] -= own;
    if constexpr (!CAPPED) dp[i] *= scores[i];
  });
  if constexpr (CAPPED) {
    for_each_pair<N>(lse, [&](int i, float own) {
      const float slope = isinf(scores[i]) ? 0.0f : fmaf(-scores[i], scores[i], 1.0f);  // inf: a hidden pair
      dp[i] *= exp2_approx(fmaf(scores[i], factor, -own)) * slope;
    });
  }
}

// A consumer's pairs, until the products that take them have been waited for.
struct Operands {
  uint32_t p[TILE_ROWS / 16][4], ds[TILE_ROWS / 16][4];

  __device__ void hold() {
#pragma unroll
    for (int j = 0; j < TILE_ROWS / 16; ++j) {
      wgmma_hold(p[j]);
      wgmma_hold(ds[j]);
    }
  }
};

// A consumer's part of a visit, for its own keys: starts what is added to dk, dv and dq. `row` is the first
// of the stage's queries. Of the products behind dq's one group is left.
template <typename T, int WIDTH, Wanted WANTED>
__device__ inline void visit_queries(float (&dk)[WIDTH / 2], float (&dv)[WIDTH / 2], float (&dq)[QUADS * 4],
                                     Operands& pairs, Shared<WIDTH>& shared,
                                     const AnyBackwardProblem& problem, const KeyTask& task, int own_stage,
                                     uint32_t visit, int row, int consumer) {
  constexpr int PARTS = Tile<WIDTH>::PARTS;
  const int stage = visit % Tile<WIDTH>::STAGES;
  auto& p = pairs.p;
  auto& ds = pairs.ds;
  const int first_key = task.key + consumer * TILE_ROWS;
  const int thread = threadIdx.x % WARPGROUP, in_tile = thread / 32 * 16 + thread % 32 / 4;  // its first key
  const uint64_t k_tile = wgmma_tile(shared.k[own_stage][consumer]),
                 v_tile = wgmma_tile(shared.v[own_stage][consumer]);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const int first_row = row + part * TILE_ROWS;
    const uint64_t q_tile = wgmma_tile(shared.q[stage][part], TILE_BYTES);
    const uint64_t dout_tile = wgmma_tile(shared.dout[stage][part], TILE_BYTES);
    float scores[TILE_ROWS / 2], dp[TILE_ROWS / 2];
    wgmma_fence();
    multiply_rows<T, WIDTH>(scores, k_tile, q_tile);
    wgmma_commit_group();
    if constexpr (WANTED.ds()) {
      multiply_rows<T, WIDTH>(dp, v_tile, dout_tile);
      wgmma_commit_group();
    }
    wgmma_wait_group<WANTED.ds()>();  // for the scores, and the part before
    wgmma_hold(scores);
    if (part > 0) {
      wgmma_hold(dk);
      wgmma_hold(dv);
      pairs.hold();
    }
    const int first_pair[2] = {first_key + in_tile, first_row + thread % 4 * 2};
    const bool masked = hides(task, first_row, first_key);
    if constexpr (WANTED.capped) {
#pragma unroll
      for (int j = 0; j < TILE_ROWS / 2; ++j) scores[j] = tanh_by_exp2(scores[j] * problem.cap);
      if (masked) hide_columns(scores, task, first_pair[0], first_pair[1]);
      exponentiate<T>(p, scores, shared.lse[stage][part], problem.factor);
    } else {
      for_each_pair<TILE_ROWS / 2>(shared.lse[stage][part], [&](int i, float own) {
        scores[i] = exp2_approx(fmaf(scores[i], problem.factor, -own));
      });
      // Behind the exponentials, this branch keeps ptxas from moving the wait for dp above them.
      if (masked) hide_pairs(scores, task, 0.0f, first_pair[0], first_pair[1]);
      round_to<T>(p, scores);
    }
    if constexpr (WANTED.ds()) {
      wgmma_wait_group<0>();  // for dp
      wgmma_hold(dp);
    }
    if constexpr (WANTED.dv) {
      wgmma_fence();
      multiply_from_registers<T, WIDTH>(dv, p, dout_tile);
      wgmma_commit_group();
    }
    if constexpr (WANTED.ds()) {
      differentiate<WANTED.capped>(scores, dp, shared.lse[stage][part], shared.delta[stage][part],
                                   problem.factor);
      if constexpr (WANTED.dk) round_to<T>(ds, dp);
      if constexpr (WANTED.dq) {
        store_pairs<T>(shared.pairs[visit % PAIR_STAGES][part][consumer], dp);
        if (part == PARTS - 1) {
          fence_proxy_async();                                       // shows them to wgmma
          named_barrier_sync(PAIRS_BARRIER, CONSUMERS * WARPGROUP);  // for the pairs of both consumers
          wgmma_fence();
          multiply_pairs<T, WIDTH>(dq, shared, own_stage, visit, consumer);
          wgmma_commit_group();
        }
      }
      if constexpr (WANTED.dk) {
        if (!WANTED.dq || part < PARTS - 1) wgmma_fence();  // else that before dq's product serves
        multiply_from_registers<T, WIDTH>(dk, ds, q_tile);
        wgmma_commit_group();
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
