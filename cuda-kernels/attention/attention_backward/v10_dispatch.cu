// attention_backward v10_dispatch: heads of every width, sequences of every length, capped scores.
//
// Change:   v09's kernel as a template over its tile, over the gradients that are wanted, and over a softcap;
//           blocks add to dq in turns only if that is asked for. With D up to 64 a block visits 128 queries
//           at a time, and each consumer adds to dq of 64 of them; the next tile's keys come while this one's
//           are multiplied. With D from 72 to 128 there are three stages of queries. Above 128 both consumers
//           share 64 keys: each computes the pairs of half the queries, passes them on through shared memory,
//           and adds up half the columns. A tile of keys belongs to a sequence, whose lengths and place its
//           producer looks up; of a batch all sequences are equally long. Gradients go to rows of any stride,
//           16 bytes at a time. The kernel that computes delta sets the sums of dq to 0.
// Why:      at D 64 both consumers added to all of dq, twice as much as was needed. At D 256 one
//           warpgroup has no registers for the sums of 64 keys. A gradient that nobody wants costs products,
//           copies and memory. Packed sequences need no padding. Shared memory that is left over lets the
//           producer be further ahead.
// Counter:  time falls, most at D 64 and where sequences are short.
// Requires: compute capability 9.0 with its own features (sm_90a); bf16 or fp16; D up to 256; D and strides
//           that are multiples of 8 elements, starts that are multiples of 16 bytes. Others are refused.
// Source:   FlashAttention-3's backward pass has sequences' padded sums, and at D 256 pairs in shared memory.
// Twin:     triton-kernels/attention/attention_backward/v10_dispatch.py
#include <cuda/atomic>

#include "any_rows.cuh"
#include "lib/head_dispatch.h"
#include "lib/ptx/reduce.cuh"
#include "wide_visit.cuh"

// The WANTED gradients of the keys of drawn tiles. sums: fp32 [B, heads, padded / TILE_ROWS, WIDTH / 64,
// PART], zero at first; the sums of dq, not scaled, in the order of QUADS and threads. turns: [B, heads,
// padded / BLOCK_M], zero at first; how many blocks have added to a tile's sums.
template <typename T, int WIDTH, Wanted WANTED>
__global__ void __launch_bounds__(THREADS, 1)
    attention_backward_v10_dispatch_kernel(const __grid_constant__ AnyBackwardProblem problem,
                                           const Queue queue, float4* sums, unsigned* turns) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = ::Tile<WIDTH>;
  constexpr int BLOCK_M = Tile::BLOCK_M, BLOCK_N = Tile::BLOCK_N, STAGES = Tile::STAGES;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared<WIDTH>& shared = *reinterpret_cast<Shared<WIDTH>*>(dynamic);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform
  const int thread = threadIdx.x % WARPGROUP;
  // Of a tile of queries, among the rows of all heads.
  const auto place_of = [&](const KeyTask& task, int in_group, int row) {
    return task.place + static_cast<int64_t>(in_group) * problem.padded + row;
  };

  if (threadIdx.x == 0) {
    for (int own_stage = 0; own_stage < Tile::OWN_STAGES; ++own_stage) {
      mbarrier_init(&shared.own_full[own_stage], (1 + WANTED.ds()) * Tile::KEY_TILES);
      mbarrier_init(&shared.own_empty[own_stage], CONSUMERS * WARPGROUP + 2 * WANTED.turns);
    }
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 2 * Tile::PARTS + 1);
      mbarrier_init(&shared.empty[stage], CONSUMERS * WARPGROUP);
      mbarrier_init(&shared.granted[stage], 1);
      mbarrier_init(&shared.passed[stage], 1);
      mbarrier_init(&shared.added[stage], CONSUMERS * WARPGROUP);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // for the barriers

  // All sides count the block's tiles of keys, and its tiles of queries over all of these.
  uint32_t turn = 0, visit = 0;
  const auto own_stage_of = [](uint32_t turn) { return turn % Tile::OWN_STAGES; };
  const auto round_of = [](uint32_t turn) { return turn / Tile::OWN_STAGES % 2; };

  if (warpgroup == 0) {
    give_back_registers<PRODUCER_REGISTERS>();
    const int warp = thread / 32;
    if (thread % 32 != 0 || warp > 2 * WANTED.turns) return;
    if (warp > 0) {  // keeps the order of turns
      for (;; ++turn) {
        mbarrier_wait_parity(&shared.own_full[own_stage_of(turn)], round_of(turn));  // for `task`
        const KeyTask task = shared.task[turn % Tile::TASKS];
        if (task.head < 0) return;
        mbarrier_arrive(&shared.own_empty[own_stage_of(turn)]);
        for (Visit at; at.exists(problem, task); at.advance(task), ++visit) {
          const int stage = visit % STAGES;
          const int row = at.row(queue, task, BLOCK_M);
          const unsigned mine = tasks_before<BLOCK_M, BLOCK_N>(queue, task, row);
          const cuda::atomic_ref<unsigned, cuda::thread_scope_device> next(
              turns[place_of(task, at.head, row) / BLOCK_M]);
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
    // Blocks draw until they are behind the last tile. So they draw as often as there are tiles, and with
    // turns once more each: a block waits for earlier tiles, which running blocks must have.
    const unsigned undrawn = WANTED.turns ? 0 : gridDim.x;
    const auto draw = [&] { return undrawn + atomicInc(queue.drawn, queue.tiles + gridDim.x - undrawn - 1); };
    // Late: who ends first draws first.
    for (unsigned number = WANTED.turns ? draw() : blockIdx.x;; number = draw()) {
      KeyTask& task = shared.task[turn % Tile::TASKS];
      if (!set_task<BLOCK_M, BLOCK_N>(task, problem, queue, number)) continue;
      const int own_stage = own_stage_of(turn);
      mbarrier_wait_parity(&shared.own_empty[own_stage],
                           round_of(turn) ^ 1);  // for the end of the tile there
      ++turn;
      if (task.head < 0) {
        for (int i = 0; i < (1 + WANTED.ds()) * Tile::KEY_TILES; ++i)
          mbarrier_arrive(&shared.own_full[own_stage]);
        return;
      }
      for (int i = 0; i < Tile::KEY_TILES; ++i) {
        const int key = task.first_k + task.key + i * TILE_ROWS;
        fetch(shared.k[own_stage][i], &problem.k, key, task.head, task.batch, &shared.own_full[own_stage]);
        if constexpr (WANTED.ds())
          fetch(shared.v[own_stage][i], &problem.v, key, task.head, task.batch, &shared.own_full[own_stage]);
      }
      for (Visit at; at.exists(problem, task); at.advance(task), ++visit) {
        const int stage = visit % STAGES;
        const int row = at.row(queue, task, BLOCK_M), head = task.head * problem.group + at.head;
        mbarrier_wait_parity(&shared.empty[stage], visit / STAGES % 2 ^ 1);  // for the stage's last use
        for (int part = 0; part < Tile::PARTS; ++part) {
          const int token = task.first_q + row + part * TILE_ROWS;
          fetch(shared.q[stage][part], &problem.q, token, head, task.batch, &shared.full[stage]);
          fetch(shared.dout[stage][part], &problem.dout, token, head, task.batch, &shared.full[stage]);
        }
        constexpr int BYTES = BLOCK_M * sizeof(float);
        const int64_t place = place_of(task, at.head, row);
        mbarrier_arrive_expect_tx(&shared.full[stage], 2 * BYTES);
        bulk_load(shared.lse[stage], problem.lse + place, BYTES, &shared.full[stage]);
        bulk_load(shared.delta[stage], problem.delta + place, BYTES, &shared.full[stage]);
      }
    }
  }

  take_registers<CONSUMER_REGISTERS>();
  const int consumer = warpgroup - 1;
  const int in_tile = thread / 32 * 16 + thread % 32 / 4;  // the thread's first row
  for (;; ++turn) {
    const int own_stage = own_stage_of(turn);
    mbarrier_wait_parity(&shared.own_full[own_stage], round_of(turn));  // for the keys and values
    const KeyTask task = shared.task[turn % Tile::TASKS];
    if (task.head < 0) return;
    const int own_tile = Tile::WIDE ? 0 : consumer;
    const int first_key = task.key + own_tile * TILE_ROWS;
    const bool packed = problem.keys.starts != nullptr;
    if (packed && first_key + TILE_ROWS > task.Sk) {
      const int keys = max(task.Sk - first_key, 0);
      clear_rows(shared.k[own_stage][own_tile], keys, consumer);
      if constexpr (WANTED.ds()) clear_rows(shared.v[own_stage][own_tile], keys, consumer);
    }
    float dk[Tile::COLUMNS / 2] = {}, dv[Tile::COLUMNS / 2] = {};
    for (Visit at; at.exists(problem, task); at.advance(task), ++visit) {
      const int stage = visit % STAGES;
      const int row = at.row(queue, task, BLOCK_M);
      mbarrier_wait_parity(&shared.full[stage], visit / STAGES % 2);  // for the stage's queries
      if (packed && row + BLOCK_M > task.Sq) {
#pragma unroll 1
        for (int part = 0; part < Tile::PARTS; ++part) {
          const int rows = min(max(task.Sq - row - part * TILE_ROWS, 0), TILE_ROWS);
          clear_rows(shared.q[stage][part], rows, consumer);
          clear_rows(shared.dout[stage][part], rows, consumer);
        }
      }
      float dq[Tile::DQ_PANELS * QUADS * 4];
      Operands pairs;
      if constexpr (Tile::WIDE) {
        visit_together<T, WANTED>(dk, dv, dq, shared, problem, task, own_stage, visit, row, consumer);
      } else {
        visit_queries<T, WIDTH, WANTED>(dk, dv, dq, pairs, shared, problem, task, own_stage, visit, row,
                                        consumer);
      }
      if constexpr (WANTED.dq) {
        // WIDE: dv's products come behind dq's.
        wgmma_wait_group<WANTED.dk || (Tile::WIDE && WANTED.dv)>();  // for dq
        wgmma_hold(dq);
        const int64_t tile = place_of(task, at.head, row) / TILE_ROWS + (WIDTH == 64 ? consumer : 0);
        const int64_t part = tile * Tile::PANELS + (WIDTH == 64 ? 0 : consumer * Tile::DQ_PANELS);
        if constexpr (WANTED.turns) mbarrier_wait_parity(&shared.granted[stage], visit / STAGES % 2);
#pragma unroll
        for (int j = 0; j < Tile::DQ_PANELS * QUADS; ++j)
          reduce_add(sums + part * (PART / 4) + j * WARPGROUP + thread,
                     {dq[j * 4], dq[j * 4 + 1], dq[j * 4 + 2], dq[j * 4 + 3]});
        if constexpr (WANTED.turns) mbarrier_arrive(&shared.added[stage]);  // each thread for itself
      }
      wgmma_wait_group<0>();  // for the last products
      wgmma_hold(dk);
      wgmma_hold(dv);
      if constexpr (!Tile::WIDE) pairs.hold();
      mbarrier_arrive(&shared.empty[stage]);  // each thread for itself: it has read lse and delta
    }
    // Each thread for itself: it has read keys, values and task.
    mbarrier_arrive(&shared.own_empty[own_stage]);
    const auto store = [&](void* gradient, const HeadStrides& stride, const auto& sums, float factor) {
      if (gradient == nullptr) return;
      const int column = Tile::WIDE ? consumer * Tile::COLUMNS : 0;
      T* rows = static_cast<T*>(gradient) + task.batch * stride.batch + task.head * stride.head +
                task.first_k * stride.row + column;
      const float scale[2] = {factor, factor};
      store_wide(rows, stride.row, sums, scale, first_key + in_tile, task.Sk, problem.D - column);
    };
    if constexpr (WANTED.dk) store(problem.dk, problem.dk_stride, dk, problem.scale);
    if constexpr (WANTED.dv) store(problem.dv, problem.dv_stride, dv, 1.0f);
  }
#endif
}

static AnyBackwardProblem any_problem_of(const AttentionBackwardArgs& args, int block_m) {
  const PackedSequences queries = {args.starts_q, static_cast<int>(args.sequences)};
  const int64_t blocks = args.starts_q ? slots_of(args.Sq, queries.count, block_m) : cdiv(args.Sq, block_m);
  if (blocks * block_m >= int64_t{1} << 31) {
    throw std::runtime_error(std::to_string(args.sequences) + " sequences take " +
                             std::to_string(blocks * block_m) +
                             " rows of sums, must take fewer than 2^31: split them");
  }
  AnyBackwardProblem problem = {problem_of(args, static_cast<int>(blocks * block_m))};
  problem.dq_stride = args.dq_stride;
  problem.dk_stride = args.dk_stride;
  problem.dv_stride = args.dv_stride;
  problem.from_end = args.from_end;
  problem.queries = queries;
  problem.keys = {args.starts_k, static_cast<int>(args.sequences)};
  if (args.softcap != 0.0f) {
    // 0 would mean that there is no cap.
    problem.cap = std::copysign(std::max(std::fabs(args.scale) / args.softcap, FLT_MIN), args.scale);
    problem.factor = args.softcap * LOG2_E;
  }
  // A limit beyond every key binds no more; clamped there, it leaves room for a sequence's shift.
  const int64_t most = std::max(args.Sq, args.Sk);
  problem.first = static_cast<int>(std::clamp(args.band.first, -most, most));
  problem.last = static_cast<int>(std::clamp(args.band.last, -most, most));
  return problem;
}

template <typename T, int WIDTH, Wanted WANTED>
static void launch_wanted(const AttentionBackwardArgs& args) {
  constexpr int BLOCK_M = Tile<WIDTH>::BLOCK_M, BLOCK_N = Tile<WIDTH>::BLOCK_N;
  AnyBackwardProblem problem = any_problem_of(args, BLOCK_M);
  const int64_t heads = args.B * args.H, rows = heads * problem.padded;
  float4* sums = nullptr;
  unsigned* turns = nullptr;
  if (heads * args.Sq > 0) {
    auto* const lse2 = static_cast<float*>(args.memory->workspace(2 * rows * sizeof(float)));
    const QueryTerms terms = {.lse2 = lse2, .delta = lse2 + rows, .padded = problem.padded};
    problem.lse = terms.lse2;
    problem.delta = terms.delta;
    if (WANTED.dq) sums = static_cast<float4*>(args.memory->workspace(rows * WIDTH * sizeof(float)));
    if (WANTED.turns) {
      const int64_t bytes = rows / BLOCK_M * sizeof(unsigned);
      turns = static_cast<unsigned*>(args.memory->workspace(bytes));
      CUDA_CHECK(cudaMemsetAsync(turns, 0, bytes, args.stream));
    }
    launch_delta<T>(args, problem, terms, BLOCK_M, WIDTH, sums);
  }
  if (args.B * args.H_KV * args.Sk > 0) {
    const int64_t blocks =
        args.starts_k ? slots_of(args.Sk, problem.keys.count, BLOCK_N) : cdiv(args.Sk, BLOCK_N);
    // Of queries, their results' gradients and their sums; of keys, values and their gradients. With turns,
    // sections have more heads, even if not all fit into L2: fewer blocks wait for each other, which matters
    // most where tiles take unequally long.
    const int64_t bytes = problem.group * args.Sq * args.D * (2 * size_of(args.dtype) + sizeof(float)) +
                          (WANTED.turns ? 0 : 4 * args.Sk * args.D * size_of(args.dtype));
    Queue queue = queue_of_heads(*args.memory, args.B * args.H_KV, args.Sk, BLOCK_N, blocks, 1, bytes);
    const int64_t see_first = queries_of_key(problem, 0), see_last = queries_of_key(problem, problem.Sk - 1);
    if (WANTED.turns && see_last != see_first) queue.section = std::min(2 * queue.section, queue.heads);
    weigh(queue, see_first, see_last);
    const auto kernel = attention_backward_v10_dispatch_kernel<T, WIDTH, WANTED>;
    allow_shared_memory(kernel, sizeof(Shared<WIDTH>));
    const int grid = std::min(queue.tiles, multiprocessor_count());
    kernel<<<grid, THREADS, sizeof(Shared<WIDTH>), args.stream>>>(problem, queue, sums, turns);
    CUDA_CHECK(cudaGetLastError());
  }
  if (sums != nullptr) {
    constexpr int WARPGROUPS = ROUNDING_THREADS / WARPGROUP;
    const int64_t parts = rows / TILE_ROWS * (WIDTH / 64);
    const unsigned grid = blocks_of(1, rows, cdiv(parts, WARPGROUPS));
    attention_backward_v10_dispatch_rounding_kernel<T, WIDTH>
        <<<grid, ROUNDING_THREADS, 0, args.stream>>>(problem, BLOCK_M, heads, sums);
    CUDA_CHECK(cudaGetLastError());
  }
}

// Calls function with std::true_type or std::false_type.
template <typename Function>
static void with(bool value, Function function) {
  value ? function(std::true_type()) : function(std::false_type());
}

template <typename T, int WIDTH>
static void launch(const AttentionBackwardArgs& args) {
  with(args.dq != nullptr, [&](auto dq) {
    with(args.dk != nullptr, [&](auto dk) {
      with(args.dv != nullptr, [&](auto dv) {
        with(args.dq != nullptr && args.deterministic, [&](auto turns) {
          with(args.softcap != 0.0f, [&](auto capped) {
            if constexpr ((dq || dk || dv) && (dq || !turns))
              // With a softcap, dk and dv share kernels: whatever is not wanted is not stored.
              launch_wanted<T, WIDTH, Wanted{dq, dk || (capped && dv), dv || (capped && dk), turns, capped}>(
                  args);
          });
        });
      });
    });
  });
}

void attention_backward_v10_dispatch(const AttentionBackwardArgs& args) {
  if (args.D > 256) throw std::runtime_error("D is " + std::to_string(args.D) + ", must be at most 256");
  if (args.D > 128) {
    args.dtype == Dtype::bf16 ? launch<__nv_bfloat16, 256>(args) : launch<__half, 256>(args);
  } else {
    dispatch_heads_of(args.dtype, args.D, [&]<typename T, int WIDTH>() { launch<T, WIDTH>(args); });
  }
}
