// attention v14_dispatch: heads of every width, sequences of every length, capped scores.
//
// Change:   v13's kernel as a template over its tile. With D up to 64 there are four consumers. Above
//           128 two consumers take 80 keys at a time, and search for maxima in each tile. A tile of
//           queries belongs to a sequence, whose lengths and place its producer looks up; of a batch all
//           sequences are equally long. Scores can pass a tanh (softcap), and are then searched. Results
//           go to rows of any stride, 16 bytes at a time.
// Why:      at D 64 a consumer's registers suffice for a fourth, and more warps hide more of each
//           other's waits. At D 256 a result leaves no room for a second tile's probabilities. Packed
//           sequences need no padding, and a block finds a tile's sequence by a search among their
//           starts, so that the host does not have to know any length. The four lanes of a row exchange
//           what they hold of it before they store, since a store takes as long for 4 bytes as for 16.
// Counter:  none at the case shown, which runs as in v13.
// Requires: compute capability 9.0 with its own features (sm_90a); bf16 or fp16; D up to 256; D and strides
//           that are multiples of 8 elements, starts that are multiples of 16 bytes. Others are refused.
// Source:   Shah et al., "FlashAttention-3" (2024), for the overlap and the tile of D 256.
// Twin:     triton-kernels/attention/attention/v14_dispatch.py
#include "coalesced_store.cuh"
#include "scores.cuh"

// WIDTH is D, padded to whole panels of 64 columns.
template <int WIDTH>
struct Tile {
  static constexpr bool WIDE = WIDTH > 128;
  static constexpr int CONSUMERS = WIDTH == 64 ? 4 : WIDE ? 2 : 3;  // warpgroups that compute 64 queries each
  static constexpr int BLOCK_M = CONSUMERS * 64;                    // queries
  static constexpr int BLOCK_N = WIDE ? 80 : 64;                    // keys
  static constexpr int STAGES = WIDTH == 64 ? 8 : WIDE ? 2 : 4;     // of keys and values
  static constexpr int Q_BUFFERS = WIDE ? 1 : 2;
  static constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
  static constexpr int PRODUCER_REGISTERS = WIDE ? 40 : 32;
  static constexpr int CONSUMER_REGISTERS = WIDTH == 64 ? 112 : WIDE ? 232 : 160;
  // Registers hold two tiles' probabilities and the scores, so that these outlive their exponentials.
  static constexpr bool SEARCHES_LATE = !WIDE;
  static constexpr int PANELS = WIDTH / 64;
  static constexpr int SCORES = BLOCK_N / 2;           // of a thread
  static constexpr int Q_BYTES = BLOCK_M * ROW_BYTES;  // of a panel
  static constexpr int K_BYTES = BLOCK_N * ROW_BYTES;  // likewise, and of v
  static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <=
                    65536 / THREADS / 8 * 8 * THREADS,
                "no more than the block starts with, or a warpgroup waits for ever");
  static_assert(!SEARCHES_LATE || SCORES + WIDTH / 2 + 2 * BLOCK_N / 4 < CONSUMER_REGISTERS,
                "a thread holds its scores, its results and two tiles' probabilities in registers");
};

template <typename Tile>
struct Shared {
  uint8_t q[Tile::Q_BUFFERS][Tile::PANELS][Tile::Q_BYTES];
  uint8_t k[Tile::STAGES][Tile::PANELS][Tile::K_BYTES];
  uint8_t v[Tile::STAGES][Tile::PANELS][Tile::K_BYTES];
  uint64_t q_full[Tile::Q_BUFFERS];   // complete when queries have come, and `task` says of which tile
  uint64_t q_empty[Tile::Q_BUFFERS];  // when all consumers' threads are done with both
  uint64_t k_full[Tile::STAGES], v_full[Tile::STAGES];
  uint64_t k_empty[Tile::STAGES], v_empty[Tile::STAGES];
  Task task[Tile::Q_BUFFERS];
};

template <typename T, int WIDTH>
__global__ void __launch_bounds__(Tile<WIDTH>::THREADS, 1)
    attention_v14_dispatch_kernel(const __grid_constant__ AnyProblem problem, const Queue queue) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = ::Tile<WIDTH>;
  using Operand = uint32_t[Tile::BLOCK_N / 16][4];  // probabilities, as wgmma takes them
  constexpr int STAGES = Tile::STAGES;
  constexpr int Q_BUFFERS = Tile::Q_BUFFERS;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared<Tile>& shared = *reinterpret_cast<Shared<Tile>*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int thread = threadIdx.x % WARPGROUP;

  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < Q_BUFFERS; ++buffer) {
      mbarrier_init(&shared.q_full[buffer], 1);
      mbarrier_init(&shared.q_empty[buffer], Tile::CONSUMERS * WARPGROUP);
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
    const int first_row = task.row + consumer * 64;  // the consumer's
    const bool idle = first_row >= task.Sq;
    Rows rows;
    float out[WIDTH / 2] = {};
    float scores[Tile::SCORES];
    Operand p;
    float shrink[2];

    const auto stage_of = [&](int i) { return (visits + i) % STAGES; };
    const auto await_copy = [&](uint64_t* full, int i) {
      mbarrier_wait_parity(&full[stage_of(i)], (visits + i) / STAGES % 2);
    };
    const auto release = [&](uint64_t* empty, int i) {
      if (thread == 0) mbarrier_arrive(&empty[stage_of(i)]);
    };
    const auto hidden = [&](int i) {  // of masked tiles
      const int key = walk[i] * Tile::BLOCK_N;
      return key > first_row + 63 + task.last || key + Tile::BLOCK_N <= first_row + task.first;
    };
    const auto await_values = [&](int i, bool masked) {
      await_copy(shared.v_full, i);
      if (!masked || problem.keys.starts == nullptr) return;
      const int keys = task.Sk - walk[i] * Tile::BLOCK_N;
      if (keys < Tile::BLOCK_N) clear_rows(shared.v[stage_of(i)], keys, consumer);
    };
    const auto pass = [&](int i) {
      await_copy(shared.k_full, i);  // though nobody reads them: arrivals must not overtake the copies
      await_copy(shared.v_full, i);
      // For all warps to have seen both, as an arrival may let the stage be filled again.
      named_barrier_sync(1 + consumer, WARPGROUP);
      release(shared.k_empty, i);
      release(shared.v_empty, i);
    };
    const auto start_products = [&](int i, const Operand& p) {
      multiply_values<T>(out, p, v_tile + stage_of(i) * STAGE_STEP);
      wgmma_commit_group();
    };
    const auto hold = [](Operand& p) {
#pragma unroll
      for (int j = 0; j < Tile::BLOCK_N / 16; ++j) wgmma_hold(p[j]);
    };
    const auto end_products = [&](int i, Operand& p) {
      wgmma_wait_group<0>();  // for the products
      wgmma_hold(out);
      hold(p);
      release(shared.v_empty, i);
    };
    const auto start_scores = [&](int i) {
      multiply_keys<T, Tile>(scores, q_tile + buffer * BUFFER_STEP, k_tile + stage_of(i) * STAGE_STEP);
      wgmma_commit_group();
    };
    const auto end_scores = [&]<int PENDING>(int i) {
      wgmma_wait_group<PENDING>();  // for the scores
      wgmma_hold(scores);
      release(shared.k_empty, i);
    };
    const auto search = [&](int i) {
      if (problem.cap != 0.0f) bound(scores, problem.cap);
      if (i < walk.masked) hide(scores, task, task.row + own_row, walk[i] * Tile::BLOCK_N + thread % 4 * 2);
      return raise(rows, shrink, scores, problem.factor);
    };
    // Starts the scores of tile i and the products of the tile before, and waits for the former.
    const auto begin = [&](int i, int before, const Operand& p, bool masked) {
      await_copy(shared.k_full, i);
      await_values(before, masked);
      wgmma_fence();
      start_scores(i);
      start_products(before, p);
      end_scores.template operator()<1>(i);
    };
    const auto visit_searched = [&](int i, int before) {
      begin(i, before, p, before < walk.masked);
      const bool grown = search(i);
      end_products(before, p);
      if (grown) rescale(out, shrink);
      exponentiate<T>(p, rows, scores, problem.factor);
    };
    const auto visit_clean = [&](int i, int before, Operand& p, Operand& next) {
      begin(i, before, p, false);
      bool grown;
      if constexpr (Tile::SEARCHES_LATE) {
        grown = exponentiate_unsearched<T>(next, rows, shrink, scores, problem.factor);
        hold(next);  // before the wait for the products
      } else {
        grown = raise(rows, shrink, scores, problem.factor);
      }
      end_products(before, p);
      if (grown) rescale(out, shrink);
      if constexpr (!Tile::SEARCHES_LATE) exponentiate<T>(next, rows, scores, problem.factor);
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
      int before = i++;                                      // the tile whose products are still to come
      constexpr int PER_TURN = Tile::SEARCHES_LATE ? 2 : 1;  // clean tiles of a turn
      const int guarded = problem.cap != 0.0f ? walk.tiles : walk.masked;
      // A row may have seen no key before a tile that hides none.
      const auto is_clean = [&] {
        return i >= guarded && before >= walk.masked && (walk.tiles - i) % PER_TURN == 0;
      };
      for (; i < walk.tiles && !is_clean(); ++i) {
        if (i < walk.masked && hidden(i)) {
          pass(i);
        } else {
          visit_searched(i, before);
          before = i;
        }
      }
      Operand other;
      Operand& next = Tile::SEARCHES_LATE ? other : p;
      for (; i < walk.tiles; i += PER_TURN) {
        visit_clean(i, before, p, next);
        if constexpr (Tile::SEARCHES_LATE) visit_clean(i + 1, i, next, p);
        before = i + PER_TURN - 1;
      }
      await_values(before, before < walk.masked);
      wgmma_fence();
      start_products(before, p);
      end_products(before, p);
    }
    visits += walk.tiles;
    store<T>(problem, out, rows, task, task.row + own_row);
    mbarrier_arrive(&shared.q_empty[buffer]);  // each thread for itself: all have read `task`
  }
#endif
}

static AnyProblem any_problem_of(const AttentionArgs& args, int block_m, int block_n) {
  AnyProblem problem = {problem_of(args, block_m, block_n)};
  problem.out_stride = args.out_stride;
  problem.queries = {args.starts_q, static_cast<int>(args.sequences)};
  problem.keys = {args.starts_k, static_cast<int>(args.sequences)};
  if (args.softcap != 0.0f) {
    problem.cap = std::max(std::fabs(args.scale) / args.softcap, FLT_MIN);  // 0 would mean that there is none
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
  const auto kernel = args.dtype == Dtype::bf16 ? attention_v14_dispatch_kernel<__nv_bfloat16, WIDTH>
                                                : attention_v14_dispatch_kernel<__half, WIDTH>;
  allow_shared_memory(kernel, sizeof(Shared<Tile>));
  const int grid = std::min(queue.tiles, multiprocessor_count());
  kernel<<<grid, Tile::THREADS, sizeof(Shared<Tile>), args.stream>>>(problem, queue);
  CUDA_CHECK(cudaGetLastError());
}

void attention_v14_dispatch(const AttentionArgs& args) {
  if (args.B * args.H * args.Sq == 0) return;
  if (args.dtype == Dtype::fp32)
    throw std::runtime_error("dtype is fp32, must be bf16 or fp16: convert the operands");
  if (args.D > 256) throw std::runtime_error("D is " + std::to_string(args.D) + ", must be at most 256");
  args.D <= 64 ? launch<64>(args) : args.D <= 128 ? launch<128>(args) : launch<256>(args);
}
