// attention v13_dispatch: heads of every width, sequences of every length, capped scores.
//
// Change:   v12's kernel as a template over its tile: with D above 128 two consumers take 80 keys at a time.
//           A tile of queries belongs to a sequence, whose lengths and place its producer looks up; of a
//           batch all sequences are equally long. Scores can pass a tanh (softcap). Results go to rows of any
//           stride, 16 bytes at a time.
// Why:      a result of 256 columns takes 128 registers a thread, and two consumers alone have room
//           for it. Packed sequences need no padding, and a block finds a tile's sequence by a search among
//           their starts, so that the host does not have to know any length. The four lanes of a row exchange
//           what they hold of it before they store, since a store takes as long for 4 bytes as for 16.
// Counter:  none at the case shown, which runs as in v12.
// Requires: compute capability 9.0 with its own features (sm_90a); bf16 or fp16; D up to 256; D and strides
//           that are multiples of 8 elements, starts that are multiples of 16 bytes. Others are refused.
// Source:   Shah et al., "FlashAttention-3" (2024), for the tile of D 256.
// Twin:     triton-kernels/attention/attention/v13_dispatch.py
#include "coalesced_store.cuh"
#include "lib/ptx/wgmma_registers.cuh"
#include "lib/tanh.cuh"

// WIDTH is D, padded to whole panels of 64 columns.
template <int WIDTH>
struct Tile {
  static constexpr bool WIDE = WIDTH > 128;
  static constexpr int CONSUMERS = WIDE ? 2 : 3;      // warpgroups that compute 64 queries each
  static constexpr int BLOCK_M = CONSUMERS * 64;      // queries
  static constexpr int BLOCK_N = WIDE ? 80 : 128;     // keys
  static constexpr int STAGES = WIDTH == 64 ? 4 : 2;  // of keys and values
  static constexpr int Q_BUFFERS = WIDE ? 1 : 2;
  static constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
  static constexpr int PRODUCER_REGISTERS = WIDE ? 40 : 32;
  static constexpr int CONSUMER_REGISTERS = WIDE ? 232 : 160;
  static constexpr int PANELS = WIDTH / 64;
  static constexpr int SCORES = BLOCK_N / 2;           // of a thread
  static constexpr int Q_BYTES = BLOCK_M * ROW_BYTES;  // of a panel
  static constexpr int K_BYTES = BLOCK_N * ROW_BYTES;  // likewise, and of v
  static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <=
                    65536 / THREADS / 8 * 8 * THREADS,
                "no more than the block starts with, or a warpgroup waits for ever");
};

template <typename Tile>
struct Shared {
  uint8_t q[Tile::Q_BUFFERS][Tile::PANELS][Tile::Q_BYTES];
  uint8_t k[Tile::STAGES][Tile::PANELS][Tile::K_BYTES];
  uint8_t v[Tile::STAGES][Tile::PANELS][Tile::K_BYTES];
  uint64_t q_full[Tile::Q_BUFFERS];   // complete when queries have come, and `task` says of which tile
  uint64_t q_empty[Tile::Q_BUFFERS];  // when all consumers' warps are done with both
  uint64_t k_full[Tile::STAGES], v_full[Tile::STAGES];
  uint64_t k_empty[Tile::STAGES], v_empty[Tile::STAGES];
  Task task[Tile::Q_BUFFERS];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Starts scores = q @ k^T.
template <typename T, typename Tile>
__device__ inline void multiply_keys(float (&scores)[Tile::SCORES], uint64_t q, uint64_t k) {
#pragma unroll
  for (int step = 0; step < Tile::PANELS * 4; ++step) {
    const int within = step % 4 * 2;  // 16 columns, in descriptors' units of 16 bytes
    wgmma_m64k16<Tile::BLOCK_N, T, false, true>(scores, q + step / 4 * (Tile::Q_BYTES / 16) + within,
                                                k + step / 4 * (Tile::K_BYTES / 16) + within, step > 0);
  }
}

// Starts out += p @ v.
template <typename T, int N, int STEPS>
__device__ inline void multiply_values(float (&out)[N], const uint32_t (&p)[STEPS][4], uint64_t v) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    wgmma_m64k16_registers<N * 2, T, false>(out, p[step], v + step * (16 * ROW_BYTES / 16), true);
}

// Softcap: puts scores into tanh. The cap itself is part of the factor that turns them into powers of 2.
template <int N>
__device__ inline void bound(float (&scores)[N], float cap) {
#pragma unroll
  for (int i = 0; i < N; ++i) scores[i] = tanh_by_exp2(scores[i] * cap);
}

// Hides keys outside the band, and beyond the last one. `row` and `key` are those of the thread's first
// score.
template <int N>
__device__ inline void hide(float (&scores)[N], const Task& task, int row, int key) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int in_row = row + i % 4 / 2 * 8;
    const int low = in_row + task.first - key;
    const int high = min(in_row + task.last, task.Sk - 1) - key;
    const int at = i / 4 * 8 + i % 2;
    if (at < low || at > high) scores[i] = -INFINITY;
  }
}

// All consumers together turn the rows of v behind the first `keys` into zeros. Behind a sequence's last key
// lie the next sequence's values, or a padding's: a NaN there times a probability of 0 would be NaN.
template <typename Tile>
__device__ inline void clear(uint8_t (&v)[Tile::PANELS][Tile::K_BYTES], int keys) {
  constexpr int PIECES = ROW_BYTES / 16;
  const int count = (Tile::BLOCK_N - keys) * PIECES;
#pragma unroll 1
  for (int i = threadIdx.x - WARPGROUP; i < count * Tile::PANELS; i += Tile::CONSUMERS * WARPGROUP)
    reinterpret_cast<uint4*>(v[i / count])[keys * PIECES + i % count] = {};
  fence_proxy_async();                                                   // shows them to wgmma
  named_barrier_sync(1 + Tile::CONSUMERS, Tile::CONSUMERS * WARPGROUP);  // for all consumers' zeros
}

// Raises the rows' maxima to those of the scores if one of the warp's has grown by much, and rescales what
// belongs to the old ones.
template <int N, int COUNT>
__device__ inline void raise(Rows& rows, float (&out)[N], const float (&scores)[COUNT], float factor) {
  constexpr float THRESHOLD = 8.0f;  // powers of 2
  float top[4] = {rows.max[0], rows.max[0], rows.max[1], rows.max[1]};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) top[i % 4] = fmaxf(top[i % 4], scores[i]);
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
template <bool MASKED, int COUNT>
__device__ inline void exponentiate(float (&scores)[COUNT], Rows& rows, float factor) {
  float shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    shift[half] = MASKED && rows.max[half] == -INFINITY ? 0.0f : rows.max[half] * factor;
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    scores[i] = exp2_approx(fmaf(scores[i], factor, -shift[i % 4 / 2]));
    sums[i % 4] += scores[i];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) rows.sum[half] += sums[half * 2] + sums[half * 2 + 1];
}

// Rounds p: where 16 columns of sums lie, wgmma expects its first operand.
template <typename T, int STEPS>
__device__ inline void round_to(uint32_t (&p)[STEPS][4], const float (&scores)[STEPS * 8]) {
#pragma unroll
  for (int i = 0; i < STEPS * 8; i += 2) {
    alignas(4) const T pair[2] = {from_float<T>(scores[i]), from_float<T>(scores[i + 1])};
    p[i / 8][i % 8 / 2] = *reinterpret_cast<const uint32_t*>(pair);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, int WIDTH>
__global__ void __launch_bounds__(Tile<WIDTH>::THREADS, 1)
    attention_v13_dispatch_kernel(const __grid_constant__ AnyProblem problem, const Queue queue) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = ::Tile<WIDTH>;
  constexpr int STAGES = Tile::STAGES;
  constexpr int Q_BUFFERS = Tile::Q_BUFFERS;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared<Tile>& shared = *reinterpret_cast<Shared<Tile>*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int thread = threadIdx.x % WARPGROUP;

  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < Q_BUFFERS; ++buffer) {
      mbarrier_init(&shared.q_full[buffer], 1);
      mbarrier_init(&shared.q_empty[buffer], Tile::CONSUMERS * WARPGROUP / 32);
    }
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.k_full[stage], 1);
      mbarrier_init(&shared.v_full[stage], 1);
      mbarrier_init(&shared.k_empty[stage], Tile::CONSUMERS);
      mbarrier_init(&shared.v_empty[stage], Tile::CONSUMERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // for the barriers

  // Both sides count the block's tiles of queries, and its tiles of keys over all of these.
  uint32_t turn = 0, visits = 0;

  if (warpgroup == 0) {
    give_back_registers<Tile::PRODUCER_REGISTERS>();
    if (thread != 0) return;
    // Blocks draw until they are behind the last tile. So they draw as often as there are tiles.
    const auto draw = [&] { return gridDim.x + atomicInc(queue.drawn, queue.tiles - 1); };
    unsigned next = 0;
    for (Task task = task_of(problem, queue, blockIdx.x);; task = task_of(problem, queue, next)) {
      const bool ended = task.head < 0;
      if (!ended && (task.row < 0 || task.row >= task.Sq)) {  // a slot without a tile
        next = draw();
        continue;
      }
      const int buffer = turn % Q_BUFFERS;
      mbarrier_wait_parity(&shared.q_empty[buffer], turn / Q_BUFFERS % 2 ^ 1);  // for the buffer's last use
      ++turn;
      shared.task[buffer] = task;
      if (ended) {
        mbarrier_arrive(&shared.q_full[buffer]);
        return;
      }
      next = draw();
      const Walk walk = walk_of(task, task.row, Tile::BLOCK_M, Tile::BLOCK_N);
      if (walk.tiles == 0) {
        mbarrier_arrive(&shared.q_full[buffer]);
      } else {
        fetch(shared.q[buffer], &problem.q, task.first_q + task.row, task.head, task.batch,
              &shared.q_full[buffer]);
      }
      for (int i = 0; i < walk.tiles; ++i, ++visits) {
        const int stage = visits % STAGES;
        const uint32_t parity = visits / STAGES % 2;
        const int row = task.first_k + walk[i] * Tile::BLOCK_N;
        const int kv_head = task.head / problem.group;
        mbarrier_wait_parity(&shared.k_empty[stage], parity ^ 1);  // for the stage's last use
        fetch(shared.k[stage], &problem.k, row, kv_head, task.batch, &shared.k_full[stage]);
        mbarrier_wait_parity(&shared.v_empty[stage], parity ^ 1);  // likewise
        fetch(shared.v[stage], &problem.v, row, kv_head, task.batch, &shared.v_full[stage]);
      }
    }
  }

  take_registers<Tile::CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1;
  const uint64_t q_tile = wgmma_tile(shared.q[0][0] + consumer * 64 * ROW_BYTES);
  const uint64_t k_tile = wgmma_tile(shared.k[0]);
  const uint64_t v_tile = wgmma_tile(shared.v[0], Tile::K_BYTES);
  constexpr int BUFFER_STEP = sizeof(shared.q[0]) / 16;
  constexpr int STAGE_STEP = sizeof(shared.k[0]) / 16;
  const int own_row = consumer * 64 + thread / 32 * 16 + thread % 32 / 4;

  for (;; ++turn) {
    const int buffer = turn % Q_BUFFERS;
    mbarrier_wait_parity(&shared.q_full[buffer], turn / Q_BUFFERS % 2);  // for the queries
    const Task& task = shared.task[buffer];  // read again where it is needed, to spare registers
    if (task.head < 0) return;
    const Walk walk = walk_of(task, task.row, Tile::BLOCK_M, Tile::BLOCK_N);
    Rows rows;
    float out[WIDTH / 2] = {};

    const auto visit = [&]<bool MASKED>(int i) {
      const int stage = visits % STAGES;
      const uint32_t parity = visits / STAGES % 2;
      ++visits;
      float scores[Tile::SCORES];
      mbarrier_wait_parity(&shared.k_full[stage], parity);  // for the stage's keys
      wgmma_fence();
      multiply_keys<T, Tile>(scores, q_tile + buffer * BUFFER_STEP, k_tile + stage * STAGE_STEP);
      wgmma_commit_group();
      wgmma_wait_group<0>();  // for the scores
      wgmma_hold(scores);
      if (thread == 0) mbarrier_arrive(&shared.k_empty[stage]);

      uint32_t p[Tile::BLOCK_N / 16][4];
      const int key = walk[i] * Tile::BLOCK_N;
      if (problem.cap != 0.0f) bound(scores, problem.cap);
      if constexpr (MASKED) hide(scores, task, task.row + own_row, key + thread % 4 * 2);
      raise(rows, out, scores, problem.factor);
      exponentiate<MASKED>(scores, rows, problem.factor);
      round_to<T>(p, scores);

      mbarrier_wait_parity(&shared.v_full[stage], parity);  // for the stage's values
      if (MASKED && problem.keys.starts != nullptr && task.Sk - key < Tile::BLOCK_N)
        clear<Tile>(shared.v[stage], task.Sk - key);
      wgmma_fence();
      multiply_values<T>(out, p, v_tile + stage * STAGE_STEP);
      wgmma_commit_group();
      wgmma_wait_group<0>();  // for the products
      wgmma_hold(out);
#pragma unroll
      for (int j = 0; j < Tile::BLOCK_N / 16; ++j) wgmma_hold(p[j]);
      if (thread == 0) mbarrier_arrive(&shared.v_empty[stage]);
    };
    const auto pass = [&](int i) {
      const int stage = visits % STAGES;
      const uint32_t parity = visits / STAGES % 2;
      ++visits;
      const int keys = task.Sk - walk[i] * Tile::BLOCK_N;
      mbarrier_wait_parity(&shared.k_full[stage], parity);  // for the stage's keys, though nobody reads them:
      mbarrier_wait_parity(&shared.v_full[stage], parity);  // arrivals must not overtake the copies
      if (problem.keys.starts != nullptr && keys < Tile::BLOCK_N) clear<Tile>(shared.v[stage], keys);
      // For all warps to have seen both, as an arrival may let the stage be filled again.
      named_barrier_sync(1 + consumer, WARPGROUP);
      if (thread == 0) mbarrier_arrive(&shared.k_empty[stage]);
      if (thread == 0) mbarrier_arrive(&shared.v_empty[stage]);
    };
    if (walk.tiles > 0 && problem.negative) negate(shared.q[buffer], consumer);
    const int first_row = task.row + consumer * 64;  // the consumer's
    const bool idle = first_row >= task.Sq;
    for (int i = 0; i < walk.masked; ++i) {
      const int key = walk[i] * Tile::BLOCK_N;
      const bool hidden = key > first_row + 63 + task.last || key + Tile::BLOCK_N <= first_row + task.first;
      if (idle || hidden) {
        pass(i);
      } else {
        visit.template operator()<true>(i);
      }
    }
    for (int i = walk.masked; i < walk.tiles; ++i) {
      if (idle) {
        pass(i);
      } else {
        visit.template operator()<false>(i);
      }
    }
    store<T>(problem, out, rows, task, task.row + own_row);
    __syncwarp();  // for the warp to have read `task`
    if (thread % 32 == 0) mbarrier_arrive(&shared.q_empty[buffer]);
  }
#endif
}

static AnyProblem any_problem_of(const AttentionArgs& args, int block_m, int block_n) {
  AnyProblem problem = {problem_of(args, block_m, block_n)};
  problem.out_stride = args.out_stride;
  problem.queries = {args.starts_q, static_cast<int>(args.sequences)};
  problem.keys = {args.starts_k, static_cast<int>(args.sequences)};
  if (args.softcap != 0.0f) {
    problem.cap = std::fabs(args.scale) / args.softcap;
    problem.factor = args.softcap * LOG2_E;
  }
  // A limit beyond every key binds no more; clamped there, it leaves room for a sequence's shift.
  const int64_t most = std::max(args.Sq, args.Sk);
  problem.first = static_cast<int>(std::clamp(args.band.first, -most, most));
  problem.last = static_cast<int>(std::clamp(args.band.last, -most, most));
  problem.from_end = args.from_end;
  if (args.starts_q != nullptr) {
    problem.blocks_m = static_cast<int>(slots_of(args.Sq, problem.queries.count, block_m));
  }
  return problem;
}

template <int WIDTH>
static void launch(const AttentionArgs& args) {
  using Tile = ::Tile<WIDTH>;
  const AnyProblem problem = any_problem_of(args, Tile::BLOCK_M, Tile::BLOCK_N);
  const Queue queue = queue_of(args, problem, Tile::BLOCK_M);
  const auto kernel = args.dtype == Dtype::bf16 ? attention_v13_dispatch_kernel<__nv_bfloat16, WIDTH>
                                                : attention_v13_dispatch_kernel<__half, WIDTH>;
  allow_shared_memory(kernel, sizeof(Shared<Tile>));
  const int grid = std::min(queue.tiles, multiprocessor_count());
  kernel<<<grid, Tile::THREADS, sizeof(Shared<Tile>), args.stream>>>(problem, queue);
  CUDA_CHECK(cudaGetLastError());
}

void attention_v13_dispatch(const AttentionArgs& args) {
  if (args.B * args.H * args.Sq == 0) return;
  if (args.dtype == Dtype::fp32)
    throw std::runtime_error("dtype is fp32, must be bf16 or fp16: convert the operands");
  if (args.D > 256) throw std::runtime_error("D is " + std::to_string(args.D) + ", must be at most 256");
  args.D <= 64 ? launch<64>(args) : args.D <= 128 ? launch<128>(args) : launch<256>(args);
}
