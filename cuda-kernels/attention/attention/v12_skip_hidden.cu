// attention v12_skip_hidden: a consumer passes over tiles that none of its own rows sees.
//
// Change:   a block visits the tiles of keys that any of its 192 queries sees. At the band's edges a
//           consumer, which has 64 of these, may see none of a tile; then it says that it is done with it and
//           multiplies nothing. Neither does a consumer all of whose rows lie behind the last query. v11's
//           consumers computed such scores, and hid them.
// Why:      a causal block of v11 computes the scores of half a tile in vain for each consumer. Where
//           sequences are short, that is a good part of all.
// Counter:  none at the case shown, whose tiles all rows see; time falls where the mask is causal.
// Requires: as v11.
// Source:   none; FlashAttention-3 chooses shorter tiles of queries for causal masks instead.
// Twin:     none; Gluon's blocks of 128 queries have one tile of keys at the diagonal, which both consumers
//           see.
#include "lib/activation.cuh"
#include "lib/ptx/wgmma_registers.cuh"
#include "queue.cuh"
#include "tile.cuh"

constexpr int CONSUMERS = 3;             // warpgroups that compute 64 queries each
constexpr int BLOCK_M = CONSUMERS * 64;  // queries
constexpr int BLOCK_N = 128;             // keys
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int PRODUCER_REGISTERS = 32;
constexpr int CONSUMER_REGISTERS = 160;
constexpr int SCORES = BLOCK_N / 2;           // of a thread
constexpr int Q_BYTES = BLOCK_M * ROW_BYTES;  // of a panel, which is 64 columns of a tile
constexpr int K_BYTES = BLOCK_N * ROW_BYTES;  // likewise, and of v

constexpr int Q_BUFFERS = 2;

template <int WIDTH>
constexpr int STAGES = WIDTH == 64 ? 4 : 2;

static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "no more than the block starts with, or a warpgroup waits for ever");
static_assert(SCORES + 128 / 2 < CONSUMER_REGISTERS, "a thread holds its scores and results in registers");

// WIDTH is D, padded to whole panels.
template <int WIDTH>
struct Shared {
  uint8_t q[Q_BUFFERS][WIDTH / 64][Q_BYTES];
  uint8_t k[STAGES<WIDTH>][WIDTH / 64][K_BYTES];
  uint8_t v[STAGES<WIDTH>][WIDTH / 64][K_BYTES];
  uint64_t q_full[Q_BUFFERS];   // complete when queries have come, and `work` says of which tile
  uint64_t q_empty[Q_BUFFERS];  // when all consumers' warps are done with both
  uint64_t k_full[STAGES<WIDTH>], v_full[STAGES<WIDTH>];
  uint64_t k_empty[STAGES<WIDTH>], v_empty[STAGES<WIDTH>];
  Work work[Q_BUFFERS];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Starts scores = q @ k^T.
template <typename T, int WIDTH>
__device__ inline void multiply_keys(float (&scores)[SCORES], uint64_t q, uint64_t k) {
#pragma unroll
  for (int step = 0; step < WIDTH / 16; ++step) {
    const int within = step % 4 * 2;  // 16 columns, in descriptors' units of 16 bytes
    wgmma_m64k16<BLOCK_N, T, false, true>(scores, q + step / 4 * (Q_BYTES / 16) + within,
                                          k + step / 4 * (K_BYTES / 16) + within, step > 0);
  }
}

// Starts out += p @ v.
template <typename T, int WIDTH>
__device__ inline void multiply_values(float (&out)[WIDTH / 2], const uint32_t (&p)[BLOCK_N / 16][4],
                                       uint64_t v) {
#pragma unroll
  for (int step = 0; step < BLOCK_N / 16; ++step)
    wgmma_m64k16_registers<WIDTH, T, false>(out, p[step], v + step * (16 * ROW_BYTES / 16), true);
}

// Hides keys outside the band, and beyond the last one. `row` and `key` are those of the thread's first
// score.
__device__ inline void hide(float (&scores)[SCORES], const Problem& problem, int row, int key) {
#pragma unroll
  for (int i = 0; i < SCORES; ++i) {
    const int in_row = row + i % 4 / 2 * 8;
    const int low = in_row + problem.first - key;
    const int high = min(in_row + problem.last, problem.Sk - 1) - key;
    const int at = i / 4 * 8 + i % 2;
    if (at < low || at > high) scores[i] = -INFINITY;
  }
}

// Raises the rows' maxima to those of the scores if one of the warp's has grown by much, and rescales what
// belongs to the old ones.
template <int N>
__device__ inline void raise(Rows& rows, float (&out)[N], const float (&scores)[SCORES], float factor) {
  constexpr float THRESHOLD = 8.0f;  // powers of 2
  float top[4] = {rows.max[0], rows.max[0], rows.max[1], rows.max[1]};
#pragma unroll
  for (int i = 0; i < SCORES; ++i) top[i % 4] = fmaxf(top[i % 4], scores[i]);
  float max[2];
  bool grown = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    max[half] = fmaxf(top[half * 2], top[half * 2 + 1]);
    max[half] = fmaxf(max[half], __shfl_xor_sync(0xffffffff, max[half], 1));
    max[half] = fmaxf(max[half], __shfl_xor_sync(0xffffffff, max[half], 2));
    grown |= (max[half] - rows.max[half]) * factor > THRESHOLD;  // false where both are -inf
  }
  if (!__any_sync(0xffffffff, grown)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = max[half] == -INFINITY ? 0.0f : max[half];
    const float shrink = exp2_approx((rows.max[half] - base) * factor);
    rows.max[half] = max[half];
    rows.sum[half] *= shrink;
#pragma unroll
    for (int j = half * 2; j < N; j += 4) {
      out[j] *= shrink;
      out[j + 1] *= shrink;
    }
  }
}

// Turns scores into powers of 2 under the rows' maxima. Only in a MASKED tile can a row have seen no key so
// far.
template <bool MASKED>
__device__ inline void exponentiate(float (&scores)[SCORES], Rows& rows, float factor) {
  float shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    shift[half] = MASKED && rows.max[half] == -INFINITY ? 0.0f : rows.max[half] * factor;
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < SCORES; ++i) {
    scores[i] = exp2_approx(fmaf(scores[i], factor, -shift[i % 4 / 2]));
    sums[i % 4] += scores[i];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) rows.sum[half] += sums[half * 2] + sums[half * 2 + 1];
}

// Rounds p: where 16 columns of sums lie, wgmma expects its first operand.
template <typename T>
__device__ inline void round_to(uint32_t (&p)[BLOCK_N / 16][4], const float (&scores)[SCORES]) {
#pragma unroll
  for (int i = 0; i < SCORES; i += 2) {
    alignas(4) const T pair[2] = {from_float<T>(scores[i]), from_float<T>(scores[i + 1])};
    p[i / 8][i % 8 / 2] = *reinterpret_cast<const uint32_t*>(pair);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    attention_v12_skip_hidden_kernel(const __grid_constant__ Problem problem, const Queue queue) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared<WIDTH>& shared = *reinterpret_cast<Shared<WIDTH>*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int thread = threadIdx.x % WARPGROUP;

  constexpr int DEPTH = STAGES<WIDTH>;

  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < Q_BUFFERS; ++buffer) {
      mbarrier_init(&shared.q_full[buffer], 1);
      mbarrier_init(&shared.q_empty[buffer], CONSUMERS * WARPGROUP / 32);
    }
    for (int stage = 0; stage < DEPTH; ++stage) {
      mbarrier_init(&shared.k_full[stage], 1);
      mbarrier_init(&shared.v_full[stage], 1);
      mbarrier_init(&shared.k_empty[stage], CONSUMERS);
      mbarrier_init(&shared.v_empty[stage], CONSUMERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // for the barriers

  // Both sides count the block's tiles of queries, and its tiles of keys over all of these.
  uint32_t turn = 0, visits = 0;

  if (warpgroup == 0) {
    give_back_registers<PRODUCER_REGISTERS>();
    if (thread != 0) return;
    Work work = work_of(queue, blockIdx.x);
    for (;; ++turn) {
      const int buffer = turn % Q_BUFFERS;
      mbarrier_wait_parity(&shared.q_empty[buffer], turn / Q_BUFFERS % 2 ^ 1);  // for the buffer's last use
      shared.work[buffer] = work;
      if (work.head < 0) {
        mbarrier_arrive(&shared.q_full[buffer]);
        return;
      }
      // Blocks draw until they are behind the last tile. So they draw as often as there are tiles.
      const unsigned drawn = atomicInc(queue.drawn, queue.tiles - 1);
      const Walk walk = walk_of(problem, work.row, BLOCK_M, BLOCK_N);
      const int head = work.head % problem.heads;
      const int batch = work.head / problem.heads;
      if (walk.tiles == 0) {
        mbarrier_arrive(&shared.q_full[buffer]);
      } else {
        fetch(shared.q[buffer], &problem.q, work.row, head, batch, &shared.q_full[buffer]);
      }
      for (int i = 0; i < walk.tiles; ++i, ++visits) {
        const int stage = visits % DEPTH;
        const uint32_t parity = visits / DEPTH % 2;
        const int row = walk[i] * BLOCK_N;
        const int kv_head = head / problem.group;
        mbarrier_wait_parity(&shared.k_empty[stage], parity ^ 1);  // for the stage's last use
        fetch(shared.k[stage], &problem.k, row, kv_head, batch, &shared.k_full[stage]);
        mbarrier_wait_parity(&shared.v_empty[stage], parity ^ 1);  // likewise
        fetch(shared.v[stage], &problem.v, row, kv_head, batch, &shared.v_full[stage]);
      }
      work = work_of(queue, gridDim.x + drawn);
    }
  }

  take_registers<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1;
  const uint64_t q_tile = wgmma_tile(shared.q[0][0] + consumer * 64 * ROW_BYTES);
  const uint64_t k_tile = wgmma_tile(shared.k[0]);
  const uint64_t v_tile = wgmma_tile(shared.v[0], K_BYTES);
  constexpr int BUFFER_STEP = sizeof(shared.q[0]) / 16;
  constexpr int STAGE_STEP = sizeof(shared.k[0]) / 16;
  const int own_row = consumer * 64 + thread / 32 * 16 + thread % 32 / 4;

  for (;; ++turn) {
    const int buffer = turn % Q_BUFFERS;
    mbarrier_wait_parity(&shared.q_full[buffer], turn / Q_BUFFERS % 2);  // for the queries
    const Work& work = shared.work[buffer];  // read again where it is needed, to spare registers
    if (work.head < 0) return;
    const Walk walk = walk_of(problem, work.row, BLOCK_M, BLOCK_N);
    Rows rows;
    float out[WIDTH / 2] = {};

    const auto visit = [&]<bool MASKED>(int i) {
      const int stage = visits % DEPTH;
      const uint32_t parity = visits / DEPTH % 2;
      ++visits;
      float scores[SCORES];
      mbarrier_wait_parity(&shared.k_full[stage], parity);  // for the stage's keys
      wgmma_fence();
      multiply_keys<T, WIDTH>(scores, q_tile + buffer * BUFFER_STEP, k_tile + stage * STAGE_STEP);
      wgmma_commit_group();
      wgmma_wait_group<0>();  // for the scores
      wgmma_hold(scores);
      if (thread == 0) mbarrier_arrive(&shared.k_empty[stage]);

      uint32_t p[BLOCK_N / 16][4];
      if constexpr (MASKED) hide(scores, problem, work.row + own_row, walk[i] * BLOCK_N + thread % 4 * 2);
      raise(rows, out, scores, problem.factor);
      exponentiate<MASKED>(scores, rows, problem.factor);
      round_to<T>(p, scores);

      mbarrier_wait_parity(&shared.v_full[stage], parity);  // for the stage's values
      wgmma_fence();
      multiply_values<T, WIDTH>(out, p, v_tile + stage * STAGE_STEP);
      wgmma_commit_group();
      wgmma_wait_group<0>();  // for the products
      wgmma_hold(out);
#pragma unroll
      for (int j = 0; j < BLOCK_N / 16; ++j) wgmma_hold(p[j]);
      if (thread == 0) mbarrier_arrive(&shared.v_empty[stage]);
    };
    const auto pass = [&] {
      const int stage = visits % DEPTH;
      const uint32_t parity = visits / DEPTH % 2;
      ++visits;
      mbarrier_wait_parity(&shared.k_full[stage], parity);  // for the stage's keys, though nobody reads them:
      mbarrier_wait_parity(&shared.v_full[stage], parity);  // arrivals must not overtake the copies
      // For all warps to have seen both, as an arrival may let the stage be filled again.
      named_barrier_sync(1 + consumer, WARPGROUP);
      if (thread == 0) mbarrier_arrive(&shared.k_empty[stage]);
      if (thread == 0) mbarrier_arrive(&shared.v_empty[stage]);
    };
    if (walk.tiles > 0 && problem.negative) negate(shared.q[buffer], consumer);
    const int first_row = work.row + consumer * 64;  // the consumer's
    const bool idle = first_row >= problem.Sq;
    for (int i = 0; i < walk.masked; ++i) {
      const int key = walk[i] * BLOCK_N;
      const bool hidden = key > first_row + 63 + problem.last || key + BLOCK_N <= first_row + problem.first;
      if (idle || hidden) {
        pass();
      } else {
        visit.template operator()<true>(i);
      }
    }
    for (int i = walk.masked; i < walk.tiles; ++i) {
      if (idle) {
        pass();
      } else {
        visit.template operator()<false>(i);
      }
    }
    const int64_t place = static_cast<int64_t>(work.head) * problem.Sq;
    const int row = work.row + own_row;
    __syncwarp();  // for the warp to have read `work`
    if (thread % 32 == 0) mbarrier_arrive(&shared.q_empty[buffer]);
    store<T>(problem, out, rows, place, row);
  }
#endif
}

void attention_v12_skip_hidden(const AttentionArgs& args) {
  if (args.B * args.H * args.Sq == 0) return;
  dispatch_heads(args, [&]<typename T, int WIDTH>() {
    const Problem problem = problem_of(args, BLOCK_M, BLOCK_N);
    const Queue queue = queue_of(args, problem, BLOCK_M);
    const auto kernel = attention_v12_skip_hidden_kernel<T, WIDTH>;
    allow_shared_memory(kernel, sizeof(Shared<WIDTH>));
    const int grid = std::min(queue.tiles, multiprocessor_count());
    kernel<<<grid, THREADS, sizeof(Shared<WIDTH>), args.stream>>>(problem, queue);
    CUDA_CHECK(cudaGetLastError());
  });
}
