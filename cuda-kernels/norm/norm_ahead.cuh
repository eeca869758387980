// Persistent clusters with a ring of rows in shared memory: the kernel of layer_norm's v07 and rms_norm's
// v04. The next rows travel while one is normalised. Terms: docs/glossary.md.
#pragma once

#include "norm_cluster.cuh"

constexpr int AHEAD_PACKS = 4;  // of a row that a thread holds
constexpr int MOST_WARPS = 16;  // of a block, beside the one that loads and sends
constexpr int AHEAD_THREADS = 32 * (MOST_WARPS + 1);
constexpr int LEAST_STAGES = 3, MOST_STAGES = 4;  // two rows are worked on, the others travel
constexpr int TURNS = 8;  // slots for rows' statistics: more than 4, see normalise_ahead

// In place of a row's index: this turn has no row, and the next row may have another skew.
constexpr int64_t PAUSE = -1;

// Which rows a cluster takes. SMs are not equally fast: with fixed shares the slowest one would finish last,
// and rows far from each other would be under way. So a cluster starts with as many rows as it has stages,
// and draws each further one from a counter when a stage is about to be free.
//
// Rows that lie a multiple of `period` apart have the same skew: they are of one kind. A cluster starts with
// rows of one kind and draws rows of that kind; when these are used up, it goes on with another kind.
struct Draws {
  // [period + 1]: how many rows of each kind were drawn, then how many clusters have finished. All 0 before
  // and after the launch.
  unsigned* drawn;
  int64_t M;
  int period, clusters, stages;

  __device__ int64_t row(int64_t which, int kind) const { return which * period + kind; }
  // How many clusters start with the kind.
  __device__ int beginners(int kind) const { return (clusters - kind + period - 1) / period; }
  // The row with which a cluster starts in this turn; PAUSE, or M or more, if its kind has no such row.
  __device__ int64_t given(int cluster, int turn) const {
    const int kind = cluster % period;
    const int64_t index = row(cluster / period + int64_t{turn} * beginners(kind), kind);
    // Rows of other kinds may be left, unless there is one kind or every row starts a cluster.
    return index < M || period == 1 || clusters == M ? index : PAUSE;
  }
  // Draws the cluster's next row. Returns its index, or PAUSE with another `kind`, or at least M if no rows
  // are left. A whole warp calls it.
  __device__ int64_t draw(int cluster, int& kind) const {
    const int lane_id = threadIdx.x % 32;
    unsigned before = 0;
    if (lane_id == 0) before = atomicAdd(&drawn[kind], 1u);
    const int64_t index = row(int64_t{stages} * beginners(kind) + __shfl_sync(~0u, before, 0), kind);
    if (index < M) return index;
    int left = 0;
    if (lane_id < period) {
      const int64_t taken = int64_t{stages} * beginners(lane_id) + __ldcg(&drawn[lane_id]);
      left = static_cast<int>(
          max(min((M - lane_id + period - 1) / period - taken, int64_t{1} << 24), int64_t{0}));
    }
    // Clusters that come here together spread over the kinds with many rows left.
    const int most = __reduce_max_sync(~0u, left);
    if (most == 0) return M;
    const unsigned kinds = __ballot_sync(~0u, left > most / 2);
    kind = __fns(kinds, 0, cluster / period % __popc(kinds) + 1);
    return PAUSE;
  }
  __device__ void end() const {
    if (atomicAdd(&drawn[period], 1u) + 1 < clusters) return;
    for (int i = 0; i <= period; ++i) drawn[i] = 0;
  }
};

// Merges the statistics of one part a lane by Chan's formula. Every lane gets the result.
template <bool CENTERED>
__device__ MeanSquares merged(MeanSquares its, float its_elements, float inverse) {
  if (!CENTERED) return {0.0f, lanes_sum(its.squares)};
  const float mean = lanes_sum(its_elements * its.mean) * inverse;
  const float distance = its.mean - mean;
  return {mean, lanes_sum(fmaf(its_elements * distance, distance, its.squares))};
}

// Stores a pack that lies within the row.
template <typename T>
__device__ void store_whole(T* place, bool aligned, Pack<T> pack) {
  if (aligned) {
    __stwb(reinterpret_cast<uint4*>(place), pack.words);
  } else {
#pragma unroll
    for (int i = 0; i < Pack<T>::SIZE; ++i) place[i] = pack[i];
  }
}

// A block's part of a split row. Packs before `head`, and from `tail` on, are ragged: they reach beyond the
// row.
template <typename T, bool WHOLE>
struct OwnPart : Part<T> {
  using Part<T>::SIZE, Part<T>::N, Part<T>::count, Part<T>::first_of;
  int head, tail;

  __device__ OwnPart(int N, const T* row, int each, int rank)
      : Part<T>(N, WHOLE ? 0 : skew_of(row), each, rank),
        head(!WHOLE && count > 0 && first_of(0) < 0 ? 1 : 0),
        tail(!WHOLE && first_of(count) > N ? count - 1 : count) {}

  // This thread's single element: its column in a ragged pack, or NONE.
  static constexpr int NONE = -1;
  __device__ int single() const {
    if (WHOLE) return NONE;
    const int lane = threadIdx.x, end = first_of(max(head, tail)) + lane - SIZE;
    if (lane < SIZE && head > 0 && lane < min(N, first_of(head))) return lane;
    if (lane >= SIZE && lane < 2 * SIZE && max(head, tail) < count && end < N) return end;
    return NONE;
  }
  // The elements of the warp that has the packs from..to. The first warp has the single elements, too.
  __device__ int elements_of(int from, int to) const {
    const int whole = max(min(tail, to) - max(head, from), 0);
    return whole * SIZE + (from == 0 ? this->elements() - max(tail - head, 0) * SIZE : 0);
  }
};

// Persistent clusters of `blocks` blocks over split rows. A block's part of a row, of at most `each` packs,
// travels by bulk copy to one of several stages in shared memory. Warps are specialised: the last one of a
// block loads parts and sends statistics; the others compute, and hold the weights and biases of their
// columns in registers. Without CENTERED (rms_norm) the mean is 0.
//
// Overlap: a warp publishes its statistics of row r + 1 before it waits for those of row r and writes row r,
// so the exchange may take as long as the work on a row. When all warps have published row r, they have
// written row r - 2, and its stage is free.
//
// Slots: the statistics of row r use slot r % TURNS. A warp that publishes row r + 2 has written row r, for
// which it had the statistics of all warps of the cluster; each of these had written row r - 2 before. So no
// computing warp needs the statistics of row r - 2 or earlier any more. The last warp has read all statistics
// of row r when it loads row r - 2 + stages, so none can publish row r + TURNS before that.
//
// Scheduling: the first block draws rows for its cluster and tells the other blocks. When all of its warps
// have published row r, it tells the row of turn r + stages. By then all blocks have written row r - 4, so
// they have read what the same slot told before, for turn r + stages - TURNS.
//
// Pauses: between rows of two kinds a turn has no row. All barriers advance as if it had one; the row before
// is written, and then columns, weights and biases are those of the next kind.
template <typename T, int PACKS, bool CENTERED, bool WHOLE>
__device__ void normalise_ahead(const NormArgs& args, const Draws& draws, int blocks, int each) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE;
  extern __shared__ __align__(LINE_BYTES) char memory[];
  __shared__ uint64_t full[MOST_STAGES];  // a phase completes when this block's part of a row has arrived,
  __shared__ uint64_t summed[TURNS];      // when all of its warps have published their statistics,
  __shared__ uint64_t exchanged[TURNS];   // when those of all blocks have arrived,
  __shared__ uint64_t told[TURNS];        // and when the turn's row is known
  __shared__ MeanSquares of_warps[TURNS][32];
  __shared__ MeanSquares of_blocks[TURNS][MOST_CLUSTER_BLOCKS];
  __shared__ int64_t drawn[TURNS];       // the row of a turn; M or more: none is left
  __shared__ int64_t rows[MOST_STAGES];  // the row in a stage

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int warps = blockDim.x / 32 - 1, stages = draws.stages;
  const int rank = blocks > 1 ? static_cast<int>(cluster_block()) : 0;
  const int cluster = blockIdx.x / blocks;
  const T* const x = static_cast<const T*>(args.x);
  const T* const residual = static_cast<const T*>(args.residual);
  const int room = (each * 16 + (LINE_BYTES - 16) + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
  const auto part_of = [&](int64_t index, int block) {
    return OwnPart<T, WHOLE>(N, x + index * args.stride_xm, each, block);
  };
  const auto is_row = [&](int64_t index) { return static_cast<uint64_t>(index) < args.M; };

  // The place for a part of x (which = 0) or of the residual (1) that begins at `begin`: as far behind a
  // line's start as in global memory, because such copies are faster.
  const auto place_of = [&](int stage, int which, const T* begin) {
    char* const place = memory + (residual ? 2 * stage + which : stage) * room;
    return reinterpret_cast<Pack<T>*>(place + reinterpret_cast<uintptr_t>(begin) % LINE_BYTES);
  };
  // Copies all packs that the part touches, so up to 14 bytes outside of the row come along. One thread calls
  // it.
  const auto load = [&](int stage, int64_t index) {
    rows[stage] = index;
    const OwnPart<T, WHOLE> part = part_of(max(index, int64_t{0}), rank);
    const int bytes = is_row(index) ? part.count * 16 : 0;
    mbarrier_arrive_expect_tx(&full[stage], bytes * (residual ? 2 : 1));
    if (bytes == 0) return;
    const auto copy = [&](int which, const T* begin) {
      bulk_load(place_of(stage, which, begin), begin, bytes, &full[stage]);
    };
    copy(0, x + index * args.stride_xm + part.first_of(0));
    if (residual) copy(1, residual + index * args.stride_rm + part.first_of(0));
  };

  // A warp's packs are adjacent.
  const auto elements_of_warp = [&](const OwnPart<T, WHOLE>& part, int warp) {
    return warp < warps ? part.elements_of(32 * PACKS * warp, 32 * PACKS * (warp + 1)) : 0;
  };

  if (warp_id == warps && lane_id == 0) {
    for (int stage = 0; stage < stages; ++stage) mbarrier_init(&full[stage], 1);
    for (int turn = 0; turn < TURNS; ++turn) {
      mbarrier_init(&summed[turn], warps);
      mbarrier_init(&exchanged[turn], 1);
      mbarrier_init(&told[turn], 1);
    }
    fence_mbarrier_init();
    for (int turn = 0; turn < stages; ++turn) load(turn, draws.given(cluster, turn));
  }
  __syncthreads();  // for the barriers to be initialised
  if (blocks > 1) cluster_arrive();

  if (warp_id == warps) {
    int kind = cluster % draws.period;  // of which the first block draws rows
    if (blocks > 1) cluster_wait();     // for all blocks to run, with their barriers initialised
    int64_t last = rows[stages - 1];    // row drawn, in the first block
    int64_t asked = last;               // row whose copy was started; M or more: none is left
    for (int i = 0; rows[i % stages] < args.M; ++i) {
      const int turn = i % TURNS;
      const OwnPart<T, WHOLE> part = part_of(max(rows[i % stages], int64_t{0}), rank);
      const float its_elements = static_cast<float>(elements_of_warp(part, lane_id));
      const float inverse = 1.0f / static_cast<float>(max(part.elements(), 1));
      mbarrier_wait_parity(&summed[turn], i / TURNS % 2);  // for all warps
      if (blocks > 1) {
        const MeanSquares its = lane_id < warps ? of_warps[turn][lane_id] : MeanSquares{};
        const MeanSquares mine = merged<CENTERED>(its, its_elements, inverse);
        if (lane_id == 0) mbarrier_arrive_expect_tx(&exchanged[turn], blocks * sizeof(MeanSquares));
        if (lane_id < blocks) store_async(&of_blocks[turn][rank], mine, &exchanged[turn], lane_id);
      }
      __syncwarp();                    // for all lanes to have waited
      if (i >= 2 && asked < args.M) {  // the stage of row i - 2 is free
        const int next = i - 2 + stages, place = next % TURNS;
        if (blocks > 1) {
          if (lane_id == 0) mbarrier_arrive_expect_tx(&told[place], sizeof(int64_t));
          mbarrier_wait_parity_cluster(&told[place], (next - stages) / TURNS % 2);  // for the first block
        }
        asked = drawn[place];
        if (lane_id == 0) load(next % stages, asked);
      }
      if (rank == 0 && last < args.M) {
        const int place = (i + stages) % TURNS;
        last = draws.draw(cluster, kind);
        if (blocks == 1 && lane_id == 0) drawn[place] = last;
        if (blocks > 1 && lane_id < blocks) store_async(&drawn[place], last, &told[place], lane_id);
      }
      __syncwarp();  // for lane 0's writes to rows and drawn
    }
    if (rank == 0 && lane_id == 0) draws.end();
    return;
  }

  // A thread has packs that lie within the row. The elements of ragged packs go to lanes of the first warp,
  // as single elements.
  OwnPart<T, WHOLE> part = part_of(draws.given(cluster, 0), rank);
  const int own = warp_id * 32 * PACKS + lane_id;  // its first pack; the i-th is 32 * i further on
  const auto holds = [&](int i) { return own + 32 * i < part.tail && (WHOLE || i > 0 || own >= part.head); };
  int first, single;   // columns
  float inverse;       // of the number of the warp's elements
  float its_elements;  // of part lane_id, for merging
  const auto take_part = [&](int64_t index) {
    part = part_of(index, rank);
    first = part.first_of(own), single = part.single();
    inverse = 1.0f / static_cast<float>(max(elements_of_warp(part, warp_id), 1));
    its_elements =
        static_cast<float>(blocks == 1 ? elements_of_warp(part, lane_id)
                                       : (lane_id < blocks ? part_of(index, lane_id).elements() : 0));
  };
  take_part(draws.given(cluster, 0));

  Pack<T> weights[PACKS], biases[PACKS];
  const auto take_factors = [&] {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) set(weights[i], j, from_float<T>(1.0f));
      biases[i] = {};
      if (!holds(i)) continue;
      if (args.weight)
        weights[i] = load_factors(static_cast<const T*>(args.weight), first + 32 * i * SIZE, N);
      if (CENTERED && args.bias)
        biases[i] = load_factors(static_cast<const T*>(args.bias), first + 32 * i * SIZE, N);
    }
  };
  take_factors();
  if (blocks > 1) cluster_wait();  // for all blocks to run, as in the last warp

  // A row in its stage: its first pack there, a thread's single element, a warp's statistics. With a residual
  // the sum replaces x. A thread touches its own packs and single element alone, so no barrier is needed.
  const auto x_in = [&](int stage, int64_t index) {
    return place_of(stage, 0, x + index * args.stride_xm + part.first_of(0));
  };
  const auto element_of = [&](Pack<T>* packs) -> T& {
    return reinterpret_cast<T*>(packs)[single - part.first_of(0)];
  };
  const auto numbers_of = [&](int stage, int64_t index) {
    Pack<T>* const packs = x_in(stage, index);
    if (residual) {
      Pack<T>* const others = place_of(stage, 1, residual + index * args.stride_rm + part.first_of(0));
      T* const added = static_cast<T*>(args.added) + index * args.N + first;
      const bool aligned = WHOLE || skew_of(added) == 0;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        if (!holds(i)) continue;
        const Pack<T> sum = packs[own + 32 * i] + others[own + 32 * i];
        packs[own + 32 * i] = sum;
        store_whole(added + 32 * i * SIZE, aligned, sum);
      }
      if (!WHOLE && single != part.NONE) {
        T& element = element_of(packs);
        element = from_float<T>(to_float(element) + to_float(element_of(others)));
        added[single - first] = element;
      }
      fence_proxy_async();  // orders these accesses before the bulk copy that fills the stage next
    }
    Pack<T> row[PACKS];
    float element = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) row[i] = holds(i) ? packs[own + 32 * i] : Pack<T>{};
    if (!WHOLE && single != part.NONE) element = to_float(element_of(packs));
    MeanSquares mine = {};
    if (CENTERED) {
      mine.mean = element;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        float sum = 0.0f;  // a chain of its own for each pack, so that additions overlap
        keep_packed(row[i]);
#pragma unroll
        for (int j = 0; j < SIZE; ++j) sum += float_of(row[i], j);
        mine.mean += sum;
      }
      mine.mean = lanes_sum(mine.mean) * inverse;
    }
    if (!WHOLE && single != part.NONE) mine.squares = (element - mine.mean) * (element - mine.mean);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float squares = 0.0f;
      keep_packed(row[i]);
      if (!holds(i)) continue;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float distance = float_of(row[i], j) - mine.mean;
        squares = fmaf(distance, distance, squares);
      }
      mine.squares += squares;
    }
    mine.squares = lanes_sum(mine.squares);
    return mine;
  };

  const float row_inverse = 1.0f / static_cast<float>(N);
  const auto write = [&](Pack<T>* packs, int64_t index, MeanSquares its) {
    const MeanSquares all = merged<CENTERED>(its, its_elements, row_inverse);
    const float rstd = rstd_of(all.squares, N, args.eps);
    if (rank == 0 && threadIdx.x == 0) {
      if (CENTERED) args.mean[index] = all.mean;
      args.rstd[index] = rstd;
    }
    const auto result = [&](float value, float weight, float bias) {
      const float unit = (value - all.mean) * rstd;
      return from_float<T>(CENTERED ? fmaf(unit, weight, bias) : unit * weight);
    };
    T* const place = static_cast<T*>(args.out) + index * args.N + first;
    const bool aligned = WHOLE || skew_of(place) == 0;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(weights[i]);  // or the compiler keeps them converted to fp32
      if (CENTERED) keep_packed(biases[i]);
      if (!holds(i)) continue;
      const Pack<T> row = packs[own + 32 * i];
      Pack<T> results;
#pragma unroll
      for (int j = 0; j < SIZE; ++j)
        set(results, j, result(float_of(row, j), float_of(weights[i], j), float_of(biases[i], j)));
      store_whole(place + 32 * i * SIZE, aligned, results);
    }
    if (!WHOLE && single != part.NONE) {
      const float weight = args.weight ? to_float(static_cast<const T*>(args.weight)[single]) : 1.0f;
      const float bias = CENTERED && args.bias ? to_float(static_cast<const T*>(args.bias)[single]) : 0.0f;
      place[single - first] = result(to_float(element_of(packs)), weight, bias);
    }
  };

  // The last iteration only writes the row before.
  int stage = 0, phase = 0;
  bool paused = false;
  for (int i = 0;; ++i) {
    mbarrier_wait_parity(&full[stage], phase);  // for the copy of this row
    const int64_t index = rows[stage];
    const bool other = !WHOLE && paused && is_row(index);
    if (other) take_part(index);
    if (index < args.M) {
      const MeanSquares mine = is_row(index) ? numbers_of(stage, index) : MeanSquares{};
      __syncwarp();  // for all lanes to have written the row before
      if (lane_id == 0) {
        of_warps[i % TURNS][warp_id] = mine;
        mbarrier_arrive(&summed[i % TURNS]);
      }
    }
    if (other) take_factors();  // the turn before had no row, so none needs the former ones
    if (i > 0) {
      const int turn = (i - 1) % TURNS, phase_before = (i - 1) / TURNS % 2;
      MeanSquares its = {};
      if (blocks > 1) {
        mbarrier_wait_parity_cluster(&exchanged[turn], phase_before);  // for the statistics of all blocks
        if (lane_id < blocks) its = of_blocks[turn][lane_id];
      } else {
        mbarrier_wait_parity(&summed[turn], phase_before);  // for those of all warps
        if (lane_id < warps) its = of_warps[turn][lane_id];
      }
      const int stage_before = (stage > 0 ? stage : stages) - 1;
      const int64_t before = rows[stage_before];
      if (WHOLE || !paused) write(x_in(stage_before, before), before, its);
    }
    paused = index < 0;
    if (index >= args.M) break;
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
#endif
}

// Launches kernel(args, draws, blocks, each), whose body is normalise_ahead. False if the GPU has no room for
// the cluster, if a row is too long for one, or if the residual's skew differs from x's.
template <typename T, typename Kernel>
bool launch_ahead(const NormArgs& args, Kernel* kernel) {
  constexpr int SIZE = Pack<T>::SIZE, MOST_PACKS = 32 * MOST_WARPS * AHEAD_PACKS;
  static_assert(LEAST_STAGES * 2 * (MOST_PACKS * 16 + LINE_BYTES) <= LARGEST_PART,
                "three rows and residuals");
  if (most_shared_memory() < LARGEST_PART) return false;
  if (args.residual && ((args.stride_rm - args.stride_xm) % SIZE != 0 ||
                        (static_cast<const T*>(args.residual) - static_cast<const T*>(args.x)) % SIZE != 0))
    return false;
  const int64_t packs = packs_of<T>(args);
  int blocks = 1;
  while (blocks < MOST_CLUSTER_BLOCKS && packs > blocks * MOST_PACKS / 2)
    blocks *= 2;  // two blocks fit an SM, without a residual
  if (packs > int64_t{blocks} * MOST_PACKS) return false;
  const int each = static_cast<int>(cdiv(packs, blocks));
  const int warps = static_cast<int>(cdiv(each, 32 * AHEAD_PACKS)) + 1;
  const int stage =
      static_cast<int>(cdiv(each * 16 + LINE_BYTES - 16, LINE_BYTES)) * LINE_BYTES * (args.residual ? 2 : 1);
  const int stages = MOST_STAGES * stage <= LARGEST_PART ? MOST_STAGES : LEAST_STAGES;
  allow_shared_memory(kernel, LARGEST_PART);
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), blocks, 32 * warps, stages * stage,
                       args.stream);
  const int resident = launch.resident(), period = skew_period<T>(args.stride_xm);
  if (resident == 0) return false;
  const int clusters = static_cast<int>(std::min<int64_t>(resident, args.M));
  auto* drawn = static_cast<unsigned*>(args.memory->zeroed());
  launch(clusters, kernel, args, Draws{drawn, args.M, period, clusters, stages}, blocks, each);
  return true;
}
