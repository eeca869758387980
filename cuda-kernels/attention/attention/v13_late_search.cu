// attention v13_late_search: exponentials before any search for maxima, under the products.
//
// Change:   a consumer takes exponentials under the maxima that its rows have, as soon as the scores are
//           there. It searches for new ones only where a sum of exponentials is large, and then takes
//           the tile's exponentials again. The next tile's scores start before the product of the last
//           one's probabilities, as in v08. A tile has 64 keys, half as many as in v12. The first tile,
//           tiles at an edge with the one behind them, and one where the number of others is odd are
//           still searched.
// Why:      a row's maximum serves while no power under it is large (v11), which the sum tells as well
//           as a comparison of all scores. Nothing stands between scores and exponentials then, and the
//           vote stands behind these, so they run under products in machine code, too. Scores have to
//           outlive their exponentials, and the last tile's probabilities their product: registers hold
//           both for 64 keys. The probabilities of two tiles have registers of their own. Copied from
//           one set to the other, they would make ptxas run the products one by one (C7513).
// Counter:  instructions and time fall; tensor_pipe rises.
// Requires: as v12.
// Source:   none.
// Twin:     triton-kernels/attention/attention/v13_late_search.py, which goes on from v11
#include "lib/activation.cuh"
#include "lib/ptx/wgmma_registers.cuh"
#include "queue.cuh"
#include "tile.cuh"

constexpr int CONSUMERS = 3;             // warpgroups that compute 64 queries each
constexpr int BLOCK_M = CONSUMERS * 64;  // queries
constexpr int BLOCK_N = 64;              // keys
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int PRODUCER_REGISTERS = 32;
constexpr int CONSUMER_REGISTERS = 160;
constexpr int SCORES = BLOCK_N / 2;           // of a thread
constexpr int Q_BYTES = BLOCK_M * ROW_BYTES;  // of a panel, which is 64 columns of a tile
constexpr int K_BYTES = BLOCK_N * ROW_BYTES;  // likewise, and of v

constexpr int Q_BUFFERS = 2;

using Operand = uint32_t[BLOCK_N / 16][4];  // probabilities, as wgmma takes them

template <int WIDTH>
constexpr int STAGES = WIDTH == 64 ? 8 : 4;

static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "no more than the block starts with, or a warpgroup waits for ever");
static_assert(SCORES + 128 / 2 + 2 * BLOCK_N / 4 < CONSUMER_REGISTERS,
              "a thread holds its scores, its results and two tiles' probabilities in registers");

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
__device__ inline void multiply_values(float (&out)[WIDTH / 2], const Operand& p, uint64_t v) {
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

constexpr float THRESHOLD = 8.0f;  // powers of 2

// Raises the rows' maxima to those of the scores if one of the warp's has grown by much. Then the result is
// true, and what was summed under the old ones has to shrink by `shrink`, as the rows' sums do here.
__device__ inline bool raise(Rows& rows, float (&shrink)[2], const float (&scores)[SCORES], float factor) {
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
  if (!__any_sync(0xffffffff, grown)) return false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = max[half] == -INFINITY ? 0.0f : max[half];
    shrink[half] = exp2_approx((rows.max[half] - base) * factor);
    rows.max[half] = max[half];
    rows.sum[half] *= shrink[half];
  }
  return true;
}

// Multiplies the results of a thread's two rows.
template <int N>
__device__ inline void rescale(float (&out)[N], const float (&shrink)[2]) {
#pragma unroll
  for (int j = 0; j < N; ++j) out[j] *= shrink[j % 4 / 2];
}

// Rounds powers of 2 of the scores, under the rows' maxima, to p: where 16 columns of sums lie, wgmma expects
// its first operand. `sum` gets those of the thread's columns. Where rows have SEEN a key their maxima are
// numbers; otherwise one may be -inf.
template <bool SEEN, typename T>
__device__ inline void powers_of(Operand& p, float (&sum)[2], const float (&scores)[SCORES], const Rows& rows,
                                 float factor) {
  float shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    shift[half] = !SEEN && rows.max[half] == -INFINITY ? 0.0f : rows.max[half] * factor;
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < SCORES; i += 2) {
    float powers[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      powers[j] = exp2_approx(fmaf(scores[i + j], factor, -shift[i % 4 / 2]));
      sums[i % 4 + j] += powers[j];
    }
    alignas(4) const T pair[2] = {from_float<T>(powers[0]), from_float<T>(powers[1])};
    p[i / 8][i % 8 / 2] = *reinterpret_cast<const uint32_t*>(pair);
  }
  sum[0] = sums[0] + sums[1];
  sum[1] = sums[2] + sums[3];
}

// Turns scores into p, and adds them to the rows' sums.
template <typename T>
__device__ inline void exponentiate(Operand& p, Rows& rows, const float (&scores)[SCORES], float factor) {
  float sum[2];
  powers_of<false, T>(p, sum, scores, rows, factor);
  rows.sum[0] += sum[0];
  rows.sum[1] += sum[1];
}

// The same before any search for maxima: the old ones serve while no sum is so large that a score may be far
// above them. Only then are maxima raised. As of `raise`, the result is true if that changed one.
template <typename T>
__device__ inline bool exponentiate_unsearched(Operand& p, Rows& rows, float (&shrink)[2],
                                               const float (&scores)[SCORES], float factor) {
  constexpr float LARGEST = 256.0f;  // no power below it is further than THRESHOLD above its maximum
  float sum[2];
  powers_of<true, T>(p, sum, scores, rows, factor);
  // Under a maximum of -inf, where all scores so far were, a sum is infinite or NaN.
  const bool large = !(sum[0] <= LARGEST && sum[1] <= LARGEST);
  bool grown = false;
  if (__any_sync(0xffffffff, large)) {
    grown = raise(rows, shrink, scores, factor);
    powers_of<false, T>(p, sum, scores, rows, factor);
  }
  rows.sum[0] += sum[0];
  rows.sum[1] += sum[1];
  return grown;
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    attention_v13_late_search_kernel(const __grid_constant__ Problem problem, const Queue queue) {
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
    const int first_row = work.row + consumer * 64;  // the consumer's
    const bool idle = first_row >= problem.Sq;
    Rows rows;
    float out[WIDTH / 2] = {};
    float scores[SCORES];
    Operand p;
    float shrink[2];

    const auto stage_of = [&](int i) { return (visits + i) % DEPTH; };
    const auto await_copy = [&](uint64_t* full, int i) {
      mbarrier_wait_parity(&full[stage_of(i)], (visits + i) / DEPTH % 2);
    };
    const auto release = [&](uint64_t* empty, int i) {
      if (thread == 0) mbarrier_arrive(&empty[stage_of(i)]);
    };
    const auto hidden = [&](int i) {  // of tiles at an edge
      const int key = walk[i] * BLOCK_N;
      return key > first_row + 63 + problem.last || key + BLOCK_N <= first_row + problem.first;
    };
    const auto pass = [&](int i) {
      await_copy(shared.k_full, i);  // though nobody reads them: arrivals must not overtake the copies
      await_copy(shared.v_full, i);
      // For all warps to have seen both, as an arrival may let the stage be filled again.
      named_barrier_sync(1 + consumer, WARPGROUP);
      release(shared.k_empty, i);
      release(shared.v_empty, i);
    };
    const auto start_scores = [&](int i) {
      multiply_keys<T, WIDTH>(scores, q_tile + buffer * BUFFER_STEP, k_tile + stage_of(i) * STAGE_STEP);
      wgmma_commit_group();
    };
    const auto end_scores = [&]<int PENDING>(int i) {
      wgmma_wait_group<PENDING>();  // for the scores
      wgmma_hold(scores);
      release(shared.k_empty, i);
    };
    const auto start_products = [&](int i, const Operand& p) {
      multiply_values<T, WIDTH>(out, p, v_tile + stage_of(i) * STAGE_STEP);
      wgmma_commit_group();
    };
    const auto hold = [](Operand& p) {
#pragma unroll
      for (int j = 0; j < BLOCK_N / 16; ++j) wgmma_hold(p[j]);
    };
    const auto end_products = [&](int i, Operand& p) {
      wgmma_wait_group<0>();  // for the products
      wgmma_hold(out);
      hold(p);
      release(shared.v_empty, i);
    };
    // Starts the scores of tile i and the products of the tile before, and waits for the former.
    const auto begin = [&](int i, int before, const Operand& p) {
      await_copy(shared.k_full, i);
      await_copy(shared.v_full, before);
      wgmma_fence();
      start_scores(i);
      start_products(before, p);
      end_scores.template operator()<1>(i);
    };
    const auto search = [&](int i) {
      if (i < walk.masked) hide(scores, problem, work.row + own_row, walk[i] * BLOCK_N + thread % 4 * 2);
      return raise(rows, shrink, scores, problem.factor);
    };
    const auto visit_searched = [&](int i, int before) {
      begin(i, before, p);
      const bool grown = search(i);
      end_products(before, p);
      if (grown) rescale(out, shrink);
      exponentiate<T>(p, rows, scores, problem.factor);
    };
    const auto visit = [&](int i, int before, Operand& p, Operand& next) {
      begin(i, before, p);
      const bool grown = exponentiate_unsearched<T>(next, rows, shrink, scores, problem.factor);
      hold(next);  // before the wait for the products
      end_products(before, p);
      if (grown) rescale(out, shrink);
    };

    if (walk.tiles > 0 && problem.negative) negate(shared.q[buffer], consumer);
    int i = 0;
    for (; i < walk.tiles && (idle || (i < walk.masked && hidden(i))); ++i) pass(i);
    if (i < walk.tiles) {
      await_copy(shared.k_full, i);
      wgmma_fence();
      start_scores(i);
      end_scores.template operator()<0>(i);
      search(i);
      exponentiate<T>(p, rows, scores, problem.factor);
      int before = i++;  // the tile whose products are still to come
      // A row may have seen no key before a tile that hides none. Behind that, an even number is left.
      for (; i < walk.tiles && (i < walk.masked || before < walk.masked || (walk.tiles - i) % 2 == 1); ++i) {
        if (i < walk.masked && hidden(i)) {
          pass(i);
        } else {
          visit_searched(i, before);
          before = i;
        }
      }
      Operand other;
      for (; i < walk.tiles; i += 2) {
        visit(i, before, p, other);
        visit(i + 1, i, other, p);
        before = i + 1;
      }
      await_copy(shared.v_full, before);
      wgmma_fence();
      start_products(before, p);
      end_products(before, p);
    }
    visits += walk.tiles;
    const int64_t place = static_cast<int64_t>(work.head) * problem.Sq;
    const int row = work.row + own_row;
    __syncwarp();  // for the warp to have read `work`
    if (thread % 32 == 0) mbarrier_arrive(&shared.q_empty[buffer]);
    store<T>(problem, out, rows, place, row);
  }
#endif
}

void attention_v13_late_search(const AttentionArgs& args) {
  if (args.B * args.H * args.Sq == 0) return;
  dispatch_heads(args, [&]<typename T, int WIDTH>() {
    const Problem problem = problem_of(args, BLOCK_M, BLOCK_N);
    const Queue queue = queue_of(args, problem, BLOCK_M);
    const auto kernel = attention_v13_late_search_kernel<T, WIDTH>;
    allow_shared_memory(kernel, sizeof(Shared<WIDTH>));
    const int grid = std::min(queue.tiles, multiprocessor_count());
    kernel<<<grid, THREADS, sizeof(Shared<WIDTH>), args.stream>>>(problem, queue);
    CUDA_CHECK(cudaGetLastError());
  });
}
