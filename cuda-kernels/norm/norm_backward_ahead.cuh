// Persistent clusters with a ring of rows in shared memory, for long rows: a kernel of the norms' dispatching
// backward steps. Rows travel several ahead, and a row's sums travel between warps and blocks while the next
// row is worked on. Terms: docs/glossary.md.
#pragma once

#include "lib/ptx/hopper.cuh"
#include "norm_backward_ahead_columns.cuh"
#include "norm_backward_early.cuh"

// Of a block, and of an SM, at most.
constexpr int BACKWARD_AHEAD_THREADS = 512, SM_THREADS = BACKWARD_AHEAD_THREADS * 5 / 4;
constexpr int FEW_PACKS = 2, MANY_PACKS = 4;  // of a thread
// Of a block, for the compiler: registers are to be enough for SM_THREADS in several smaller blocks.
template <int PACKS>
constexpr int MOST_THREADS = PACKS == FEW_PACKS ? SM_THREADS : BACKWARD_AHEAD_THREADS;
// Two rows are worked on, at least one travels.
constexpr int LEAST_BACKWARD_STAGES = 3, MOST_BACKWARD_STAGES = 4;
constexpr int RING_BYTES = 208 * 1024;         // of an SM
constexpr int BYTES_UNDER_WAY = 30 * 1024;     // to an SM: more was no faster
constexpr int MOST_WAVES = 4, MANY_ROWS = 64;  // of groups; of a group, to be divided unevenly
constexpr int BACKWARD_TURNS = 4;              // slots for rows' sums
// Of a row's sums: one a warp.
constexpr int MOST_WARP_SUMS = BACKWARD_AHEAD_THREADS / 32 * MOST_CLUSTER_BLOCKS;
constexpr int AHEAD_BYTES =
    RING_BYTES + BACKWARD_TURNS * MOST_WARP_SUMS * static_cast<int>(sizeof(GradientSums));

// How a row is split: over `blocks` blocks, of up to `each` packs a block and `packs` packs a thread. A block
// has `stages` stages.
struct AheadShape {
  int blocks, each, packs, threads, stages;
  Layout layout;

  // Packs of a stage for one matrix: all that threads read, or all that a copy may fill, which may begin
  // anywhere in the stage's first line. Where skews differ, the part may begin in the copy's first pack, and
  // threads read up to two packs behind it.
  __host__ __device__ int pitch() const {
    if (layout == Layout::LINED) return packs * threads;
    const int read = layout == Layout::DIFFER ? each + 2 : each;
    return (read + 2 * (LINE_PACKS - 1)) / LINE_PACKS * LINE_PACKS;
  }
  // Packs of weights, which threads read from shared memory where skews differ.
  __host__ __device__ int weights() const { return layout == Layout::DIFFER ? each + 2 : 0; }
  int ring(int matrices) const { return (stages * matrices * pitch() + weights()) * 16; }
  int sums() const { return BACKWARD_TURNS * blocks * threads / 32 * static_cast<int>(sizeof(GradientSums)); }
  int sm_blocks() const { return SM_THREADS / threads; }
};

// Which rows a group (a cluster) takes. The first `large` groups take `many` rows each, `large` rows apart.
// The rows after those go to small groups, which take `few` rows each, `period` rows apart. Rows that lie a
// multiple of `period` apart have the same skew.
struct RowGroups {
  int M, large, many, few, period;

  __device__ int step(int group) const { return group < large ? large : period; }
  __device__ int first(int group) const {
    const int other = group - large;
    return other < 0 ? group : large * many + other / period * period * few + other % period;
  }
  // The index that the row after the group's last one would have.
  __device__ int end(int group) const {
    const int start = first(group), apart = step(group);
    const int left = max(M - start + apart - 1, 0) / apart;
    return start + min(group < large ? many : few, left) * apart;
  }
  int count() const {
    const int rest = std::max(M - large * many, 0);
    return large + static_cast<int>(cdiv(rest, few * period)) * period;
  }
};

// Persistent clusters over split rows. A cluster takes one group of rows; unless skews DIFFER, these have the
// same skew, which is also that of dout, dadded and dx. The loop has no barrier of the block: a warp waits
// for a row's copies, and for the sums of the row before. A cluster leaves the partial sums of its rows for
// dweight and dbias in the workspace.
template <typename T, int PACKS, Norm NORM, Layout LAYOUT, Affine AFFINE>
__device__ void backward_rows_ahead(const NormBackwardArgs& args, const AheadShape& shape,
                                    const RowGroups& groups, float* workspace) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE;
  constexpr bool CENTERED = NORM == Norm::LAYER;
  constexpr bool LINED = LAYOUT == Layout::LINED, DIFFER = LAYOUT == Layout::DIFFER;
  constexpr bool SUMMED = AFFINE == Affine::GIVEN;
  // The stages, [stages, matrices, pitch] packs, then the weights, then the slots for rows' sums,
  // [BACKWARD_TURNS, count].
  extern __shared__ __align__(128) uint4 room[];
  // The 16 bytes with a row's statistic.
  __shared__ __align__(16) float statistics[MOST_BACKWARD_STAGES][CENTERED ? 2 : 1][4];
  __shared__ uint64_t arrived[MOST_BACKWARD_STAGES];  // a phase completes when a row's copies have arrived
  __shared__ uint32_t readers[MOST_BACKWARD_STAGES];  // warps that are done with the row
  __shared__ uint64_t complete[BACKWARD_TURNS];  // a phase completes when all of a row's sums have arrived
  const int N = static_cast<int>(args.N), warps = blockDim.x / 32;
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int blocks = shape.blocks, stages = shape.stages, rank = rank_in_cluster(blocks);
  const int cluster = blockIdx.x / blocks, clusters = gridDim.x / blocks;
  const int first = groups.first(cluster), step = groups.step(cluster), end = groups.end(cluster);
  const int matrices = args.dadded ? 3 : 2, pitch = shape.pitch();
  Pack<T>* const ring = reinterpret_cast<Pack<T>*>(room);
  const int count = blocks * warps;
  GradientSums* const parts =
      reinterpret_cast<GradientSums*>(room + stages * matrices * pitch + shape.weights());
  // Programmatic dependent launch: the kernel that adds the partial sums may be set up as soon as blocks of
  // this one leave room. This kernel itself was launched without it, and waits for none.
  if (workspace) allow_dependent_launch();

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(&arrived[stage], 1);
      readers[stage] = 0;
    }
    for (uint64_t& barrier : complete) mbarrier_init(&barrier, blocks > 1 ? 1 : warps);
    fence_mbarrier_init();
  }
  __syncthreads();  // for the barriers to be initialised
  if (blocks > 1) cluster_arrive();

  const int row_skew =
      LAYOUT == Layout::ALIKE ? skew_of(static_cast<const T*>(args.x) + first * args.stride_xm) : 0;
  const Parts<T> columns_of{N, row_skew, shape.each};
  const int start = columns_of.start(rank), n = columns_of.count(rank), skew = rank == 0 ? row_skew : 0;

  // A row's part in a stage: as far behind a line's start as in global memory, because such copies are
  // faster. Only an address' low bits count, so 32 bits are enough.
  const auto held = [&](int matrix, const void* rows, int64_t stride, int index, int stage) {
    Pack<T>* const place = ring + (stage * matrices + matrix) * pitch;
    if (LINED) return StagedPart<T>{place, 0};
    const uint32_t address =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(rows)) +
        (static_cast<uint32_t>(index) * static_cast<uint32_t>(stride) + start) * sizeof(T);
    return StagedPart<T>{place + address / 16 % LINE_PACKS, static_cast<int>(address % 16 / sizeof(T))};
  };
  // Which of the four floats in its 16 bytes a row's statistic is.
  const auto place_of = [](const float* one) { return reinterpret_cast<uintptr_t>(one) % 16 / 4; };
  // Copies a row to a stage; one thread calls it. Whole packs are copied: elements beside the part in its
  // first and last 16 bytes are masked later. Where the last 16 bytes may end behind a matrix, this thread
  // copies their elements itself; its arrival makes these visible to the threads that wait.
  const int64_t least_stride =
      min(min(args.stride_xm, args.stride_dm), args.dadded ? args.stride_am : args.stride_xm);
  // Rows before this one need no check: their word of statistics, and the last 16 bytes of their parts, end
  // inside of the tensors.
  const int64_t rows_of_pack = LINED ? 0 : least_stride > 0 ? cdiv(int64_t{SIZE}, least_stride) : groups.M;
  const int checked_from = groups.M - static_cast<int>(max(rows_of_pack, int64_t{3}));
  const auto fetch = [&](int index, int stage) {
    const auto copy_word = [&](int which, const float* one) {
      bulk_load(statistics[stage][which], one - place_of(one), 16, &arrived[stage]);
    };
    if (!DIFFER && index < checked_from) {
      const uint32_t bytes = n > 0 ? cdiv(n + skew, SIZE) * sizeof(uint4) : 0;
      mbarrier_arrive_expect_tx(&arrived[stage], matrices * bytes + sizeof(statistics[0]));
      copy_word(0, args.rstd + index);
      if constexpr (CENTERED) copy_word(1, args.mean + index);
      if (bytes == 0) return;
      const auto copy = [&](int matrix, const void* rows, int64_t stride) {
        bulk_load(const_cast<Pack<T>*>(held(matrix, rows, stride, index, stage).packs),
                  static_cast<const T*>(rows) + index * stride + (start - skew), bytes, &arrived[stage]);
      };
      copy(0, args.x, args.stride_xm);
      copy(1, args.dout, args.stride_dm);
      if (args.dadded) copy(2, args.dadded, args.stride_am);
      return;
    }
    const bool is_end = !LINED && start + n == N && (groups.M - 1 - index) * least_stride < SIZE;
    const auto before = [&](const T* row) { return DIFFER ? skew_of(row) : skew; };
    const auto part_of = [&](const void* rows, int64_t stride) {
      return static_cast<const T*>(rows) + index * stride + start;
    };
    const auto bytes_of = [&](const T* row) -> uint32_t {
      const int elements = n > 0 ? n + before(row) : 0;
      return (is_end ? elements / SIZE : cdiv(elements, SIZE)) * sizeof(uint4);
    };
    const auto for_each_matrix = [&](auto act) {
      act(0, args.x, args.stride_xm);
      act(1, args.dout, args.stride_dm);
      if (args.dadded) act(2, args.dadded, args.stride_am);
    };
    const auto copy_parts = [&] {
      for_each_matrix([&](int matrix, const void* rows, int64_t stride) {
        const T* const row = part_of(rows, stride);
        if (bytes_of(row) == 0) return;
        Pack<T>* const to = const_cast<Pack<T>*>(held(matrix, rows, stride, index, stage).packs);
        bulk_load(to, row - before(row), bytes_of(row), &arrived[stage]);
      });
    };
    if (DIFFER && index < checked_from) {
      uint32_t bytes = sizeof(statistics[0]);
      for_each_matrix(
          [&](int, const void* rows, int64_t stride) { bytes += bytes_of(part_of(rows, stride)); });
      mbarrier_arrive_expect_tx(&arrived[stage], bytes);
      copy_word(0, args.rstd + index);
      if constexpr (CENTERED) copy_word(1, args.mean + index);
      copy_parts();
      return;
    }
    uint32_t bytes = 0;
    for_each_matrix([&](int, const void* rows, int64_t stride) { bytes += bytes_of(part_of(rows, stride)); });
    if (is_end && n > 0) {
      for_each_matrix([&](int matrix, const void* rows, int64_t stride) {
        const T* const row = part_of(rows, stride);
        const Pack<T>* const to = held(matrix, rows, stride, index, stage).packs;
#pragma unroll 1
        for (int at = max((before(row) + n) / SIZE * SIZE, before(row)); at < before(row) + n; ++at)
          reinterpret_cast<T*>(const_cast<Pack<T>*>(to))[at] = row[at - before(row)];
      });
    }
    // The statistics of four rows are one word. This thread copies those of the last rows, if they are fewer.
    const auto is_word = [&](const float* one) { return index - place_of(one) + 4 <= groups.M; };
    const auto expect_statistic = [&](int which, const float* one) {
      if (!is_word(one)) statistics[stage][which][place_of(one)] = *one;
      bytes += is_word(one) ? 16 : 0;
    };
    const auto copy_statistic = [&](int which, const float* one) {
      if (is_word(one)) bulk_load(statistics[stage][which], one - place_of(one), 16, &arrived[stage]);
    };
    expect_statistic(0, args.rstd + index);
    if constexpr (CENTERED) expect_statistic(1, args.mean + index);
    mbarrier_arrive_expect_tx(&arrived[stage], bytes);
    copy_statistic(0, args.rstd + index);
    if constexpr (CENTERED) copy_statistic(1, args.mean + index);
    copy_parts();
  };
  if (threadIdx.x == 0) {
    int index = first;
    for (int stage = 0; stage < stages && index < end; ++stage, index += step) fetch(index, stage);
  }

  AheadColumns<T, PACKS, NORM, LAYOUT, AFFINE> columns(args.weight, start, n, skew,
                                                       ring + stages * matrices * pitch);
  if (DIFFER && AFFINE == Affine::GIVEN) __syncthreads();  // for the weights in shared memory
  for (int place = 0; LINED && place < stages * matrices; ++place) columns.clear(ring + place * pitch);
  const auto statistics_of = [&](int index, int stage, float* mean, float* rstd) {
    *rstd = statistics[stage][0][place_of(args.rstd + index)];
    *mean = CENTERED ? statistics[stage][CENTERED][place_of(args.mean + index)] : 0.0f;
  };
  if (blocks > 1) cluster_wait();  // for all blocks to run, with their barriers initialised

  // An iteration sums a row, then writes the row before it, whose sums have had the time of a row to arrive.
  int stage = 0, before = 0;
  uint32_t turn = 0, parity = 0;
  float mean, rstd;
  for (int index = first; index < end + step; index += step, ++turn) {
    const int stage_now = stage;
    if (index < end) {
      mbarrier_wait_parity(&arrived[stage], parity);  // for the copies of this row
      const StagedPart<T> x = held(0, args.x, args.stride_xm, index, stage);
      const StagedPart<T> dout = held(1, args.dout, args.stride_dm, index, stage);
      statistics_of(index, stage, &mean, &rstd);
      const GradientSums sums = lanes_sum(columns.add(x, dout, mean, rstd));
      // Slot reuse: a warp that sends the sums of row r has received all sums of row r - 2. Every warp sent
      // those after it had read the sums of row r - 4, so the slot of row r - 4 is free.
      const int place = turn % BACKWARD_TURNS;
      GradientSums* const mine = &parts[place * count + rank * warps + warp_id];
      if (blocks > 1) {
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(&complete[place], count * sizeof(GradientSums));
        if (lane_id < blocks) store_async(mine, sums, &complete[place], lane_id);
      } else if (lane_id == 0) {
        *mine = sums;
        mbarrier_arrive(&complete[place]);
      }
      if (++stage == stages) stage = 0, parity ^= 1;
    }
    if (turn > 0) {
      const int place = (turn - 1) % BACKWARD_TURNS;
      const uint32_t sent = (turn - 1) / BACKWARD_TURNS % 2;
      if (blocks > 1) {
        mbarrier_wait_parity_cluster(&complete[place], sent);  // for all blocks' sums of the row
      } else {
        mbarrier_wait_parity(&complete[place], sent);  // for all warps' sums of the row
      }
      GradientSums sums = {};
#pragma unroll 4
      for (int part = lane_id; part < count; part += 32) {
        sums.product += parts[place * count + part].product;
        sums.plain += parts[place * count + part].plain;
      }
      sums = lanes_sum(sums);
      const int row = index - step;
      statistics_of(row, before, &mean, &rstd);
      columns.write(held(0, args.x, args.stride_xm, row, before),
                    held(1, args.dout, args.stride_dm, row, before),
                    args.dadded ? held(2, args.dadded, args.stride_am, row, before) : StagedPart<T>{},
                    static_cast<T*>(args.dx) + row * args.N + start, mean, rstd,
                    {sums.product / static_cast<float>(N), sums.plain / static_cast<float>(N)});
      // The last warp to finish with the row starts the copy of the next row to its stage.
      __syncwarp();  // for all lanes to be done with the row
      const int next = index + (stages - 1) * step;
      if (lane_id == 0 && is_last_of(&readers[before], warps) && next < end) fetch(next, before);
    }
    before = stage_now;
  }

  if (AFFINE == Affine::NONE || workspace == nullptr) return;
  // Through shared memory, so that a warp writes whole lines.
  __syncthreads();  // for all warps to be done with the ring
  float* const sums = reinterpret_cast<float*>(room);
#pragma unroll
  for (int which = 0; which < (CENTERED ? 2 : 1); ++which) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (!columns.holds(i)) continue;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        sums[(which * pitch + columns.pack_of(i)) * SIZE + j] =
            which == 0 ? columns.dweight[SUMMED ? i : 0][j]
                       : columns.dbias[SUMMED && CENTERED ? i : 0][SUMMED && CENTERED ? j : 0];
      }
    }
  }
  __syncthreads();  // for all threads' sums
#pragma unroll
  for (int which = 0; which < (CENTERED ? 2 : 1); ++which) {
    float* to = partial_sums(workspace, which, clusters, args.N, cluster) + start;
    for (int col = threadIdx.x; col < n; col += blockDim.x) to[col] = sums[which * pitch * SIZE + skew + col];
  }
#endif
}
