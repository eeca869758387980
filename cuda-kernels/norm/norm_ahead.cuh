// Persistent clusters with a ring of rows in shared memory: a kernel of layer_norm's v12 and rms_norm's v07,
// for the longest rows that registers do not hold. The next rows travel while one is normalised. Terms:
// docs/glossary.md.
#pragma once

#include "norm_cluster.cuh"
#include "norm_draws.cuh"

constexpr int AHEAD_PACKS = 4;  // of a row that a thread holds
constexpr int MOST_WARPS = 16;  // of a block, beside the one that loads and sends
constexpr int AHEAD_THREADS = 32 * (MOST_WARPS + 1);
constexpr int LEAST_STAGES = 3, MOST_STAGES = 4;  // two rows are worked on, the others travel
constexpr int TURNS = 8;  // slots for rows' statistics: more than 4, see normalise_ahead

// Merges the statistics of one part a lane by Chan's formula. Every lane gets the result.
template <Norm NORM>
__device__ MeanSquares merged(MeanSquares its, float its_elements, float inverse) {
  if (NORM == Norm::RMS) return {0.0f, lanes_sum(its.squares)};
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

// Persistent clusters of `blocks` blocks over split rows. A block's part of a row, of at most `each` packs,
// travels by bulk copy to one of several stages in shared memory. Warps are specialised: the last one of a
// block loads parts and sends statistics; the others compute, and hold the weights and biases of their
// columns in registers.
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
template <typename T, int PACKS, Norm NORM, Alignment ALIGNMENT>
__device__ void normalise_ahead(const NormArgs& args, const Draws& draws, int blocks, int each) {
#if __CUDA_ARCH__ >= 900
  constexpr bool CENTERED = NORM == Norm::LAYER, WHOLE = ALIGNMENT == Alignment::PACK;
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
    return OwnPart<T, ALIGNMENT>(N, x + index * args.stride_xm, each, block);
  };
  const auto is_row = [&](int64_t index) { return static_cast<uint64_t>(index) < args.M; };

  // The place for a part of x (which = 0) or of the residual (1) that begins at `begin`: as far behind a
  // line's start as in global memory, because such copies are faster.
  const auto place_of = [&](int stage, int which, const T* begin) {
    char* const place = memory + (residual ? 2 * stage + which : stage) * room;
    return reinterpret_cast<Pack<T>*>(place + reinterpret_cast<uintptr_t>(begin) % LINE_BYTES);
  };
  // Copies all packs that the part touches, so up to 14 bytes outside of the row come along. Of the matrix's
  // last pack, which may reach beyond it, the elements are copied one by one, before the arrival, which
  // releases them. One thread calls it.
  const auto load = [&](int stage, int64_t index) {
    rows[stage] = index;
    const OwnPart<T, ALIGNMENT> part = part_of(max(index, int64_t{0}), rank);
    const auto begin = [&](const T* matrix, int64_t stride) {
      return matrix + index * stride + part.first_of(0);
    };
    const auto packs_in = [&](int which, const T* matrix, int64_t stride) {  // that a bulk copy brings
      const int last = part.count - 1;
      if (WHOLE || part.first_of(part.count) <= N + (args.M - 1 - index) * stride) return part.count;
      const T* const first = begin(matrix, stride);
      T* const place = reinterpret_cast<T*>(place_of(stage, which, first) + last);
      for (int i = 0; part.first_of(last) + i < N; ++i) place[i] = first[last * SIZE + i];
      fence_proxy_async();  // orders these stores before the bulk copy that fills the stage next
      return last;
    };
    const auto copy = [&](int which, const T* first, int packs) {
      if (packs > 0) bulk_load(place_of(stage, which, first), first, packs * 16, &full[stage]);
    };
    if (!is_row(index) || part.count == 0) return mbarrier_arrive_expect_tx(&full[stage], 0);
    const int of_x = packs_in(0, x, args.stride_xm);
    const int of_residual = residual ? packs_in(1, residual, args.stride_rm) : 0;
    mbarrier_arrive_expect_tx(&full[stage], (of_x + of_residual) * 16);
    copy(0, begin(x, args.stride_xm), of_x);
    copy(1, begin(residual, args.stride_rm), of_residual);
  };

  // A warp's packs are adjacent.
  const auto elements_of_warp = [&](const OwnPart<T, ALIGNMENT>& part, int warp) {
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
      const OwnPart<T, ALIGNMENT> part = part_of(max(rows[i % stages], int64_t{0}), rank);
      const float its_elements = static_cast<float>(elements_of_warp(part, lane_id));
      const float inverse = 1.0f / static_cast<float>(max(part.elements(), 1));
      mbarrier_wait_parity(&summed[turn], i / TURNS % 2);  // for all warps
      if (blocks > 1) {
        const MeanSquares its = lane_id < warps ? of_warps[turn][lane_id] : MeanSquares{};
        const MeanSquares mine = merged<NORM>(its, its_elements, inverse);
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
  OwnPart<T, ALIGNMENT> part = part_of(draws.given(cluster, 0), rank);
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
    const MeanSquares all = merged<NORM>(its, its_elements, row_inverse);
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
  static_assert(LEAST_STAGES * 2 * (MOST_PACKS * 16 + LINE_BYTES) <= LARGEST_NORM_PART,
                "three rows and residuals");
  if (most_shared_memory() < LARGEST_NORM_PART) return false;
  if (args.residual && ((args.stride_rm - args.stride_xm) % SIZE != 0 ||
                        (static_cast<const T*>(args.residual) - static_cast<const T*>(args.x)) % SIZE != 0))
    return false;
  const int64_t packs = most_packs<T>(args.x, args.N, args.stride_xm);
  int blocks = 1;
  while (blocks < MOST_CLUSTER_BLOCKS && packs > blocks * MOST_PACKS / 2)
    blocks *= 2;  // two blocks fit an SM, without a residual
  if (packs > int64_t{blocks} * MOST_PACKS) return false;
  const int each = static_cast<int>(cdiv(packs, blocks));
  const int warps = static_cast<int>(cdiv(each, 32 * AHEAD_PACKS)) + 1;
  const int stage =
      static_cast<int>(cdiv(each * 16 + LINE_BYTES - 16, LINE_BYTES)) * LINE_BYTES * (args.residual ? 2 : 1);
  const int stages = MOST_STAGES * stage <= LARGEST_NORM_PART ? MOST_STAGES : LEAST_STAGES;
  allow_shared_memory(kernel, LARGEST_NORM_PART);
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), blocks, 32 * warps, stages * stage,
                       args.stream);
  const int resident = launch.resident(), period = skew_period<T>(args.stride_xm);
  if (resident == 0) return false;
  const int clusters = static_cast<int>(std::min<int64_t>(resident, args.M));
  auto* drawn = static_cast<unsigned*>(args.memory->zeroed());
  launch(clusters, kernel, args, Draws{drawn, args.M, period, clusters, stages}, blocks, each);
  return true;
}
