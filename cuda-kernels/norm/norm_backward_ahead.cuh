// Persistent clusters with a ring of rows in shared memory: the kernel of layer_norm_backward's v06 and
// rms_norm_backward's v04. Rows travel several ahead, and a row's sums travel between warps and blocks while
// the next row is worked on. Terms: docs/glossary.md.
#pragma once

#include "lib/early.cuh"
#include "lib/ptx/hopper.cuh"
#include "norm_backward.cuh"

constexpr int AHEAD_THREADS = 512, SM_THREADS = AHEAD_THREADS * 5 / 4;  // of a block, and of an SM, at most
constexpr int FEW_PACKS = 2, MANY_PACKS = 4;                            // of a thread
constexpr int RING_BYTES = 208 * 1024;                                  // of an SM
constexpr int LEAST_STAGES = 3, MOST_STAGES = 4;  // two rows are worked on, at least one travels
constexpr int BYTES_UNDER_WAY = 30 * 1024;        // to an SM: more was no faster
constexpr int MOST_WAVES = 4, MANY_ROWS = 64;     // of groups; of a group, to be divided unevenly
constexpr int TURNS = 4;                          // slots for rows' sums
constexpr int MOST_WARP_SUMS = AHEAD_THREADS / 32 * MOST_CLUSTER_BLOCKS;  // of a row's sums: one a warp
constexpr int AHEAD_BYTES = RING_BYTES + TURNS * MOST_WARP_SUMS * static_cast<int>(sizeof(GradientSums));

// How a row is split: over `blocks` blocks, of up to `each` packs a block and `packs` packs a thread. A block
// has `stages` stages. `lined`: all parts of all rows are whole lines.
struct AheadShape {
  int blocks, each, packs, threads, stages;
  bool lined;

  // Packs of a stage for one matrix: all that threads read, or all that a copy may fill, which may begin
  // anywhere in the stage's first line.
  __host__ __device__ int pitch() const {
    return lined ? packs * threads : (each + 2 * (LINE_PACKS - 1)) / LINE_PACKS * LINE_PACKS;
  }
  int ring(int matrices) const { return stages * matrices * pitch() * 16; }
  int sums() const { return TURNS * blocks * threads / 32 * static_cast<int>(sizeof(GradientSums)); }
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

// A thread's columns, the same in all rows of its block, and its sums over these rows for dweight and dbias.
// LINED: the packs of a stage behind the block's part are 0, and stay 0.
template <typename T, int PACKS, bool CENTERED, bool LINED>
struct AheadColumns {
  static constexpr int SIZE = Pack<T>::SIZE;
  int n, skew;  // the elements of the block's part of a row, and those before it in its first pack
  bool ragged;  // whether a pack of the thread reaches beyond the part
  Pack<T> weights[PACKS];
  float dweight[PACKS][SIZE] = {}, dbias[CENTERED ? PACKS : 1][CENTERED ? SIZE : 1] = {};

  __device__ AheadColumns(const void* weight, int start, int n, int skew) : n(n), skew(skew), ragged(false) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      ragged = ragged || (first_of(i) < n && !is_whole<T>(first_of(i), n));
      weights[i] = load_weights<T>(weight, start, first_of(i), n);
    }
  }

  __device__ int pack_of(int i) const { return i * blockDim.x + threadIdx.x; }
  __device__ int first_of(int i) const { return pack_of(i) * SIZE - skew; }

  // Weights, converted anew for every use: common-subexpression elimination (CSE) would keep the converted
  // ones, in twice the registers.
  __device__ Pack<T> weight_of(int i) {
    keep_packed(weights[i]);
    return weights[i];
  }

  __device__ bool holds(int i) const { return LINED || first_of(i) < n; }
  // Whether the loop over packs may stop before the i-th. It tests every second pack: with a test a pack,
  // each load would be waited for, and with fewer tests the loads would take too many registers.
  __device__ bool ends_before(int i) const { return i > 0 && i % 2 == 0 && !holds(i); }
  __device__ Pack<T> read(const Pack<T>* packs, int i) const {
    return holds(i) ? packs[pack_of(i)] : Pack<T>{};
  }

  // Clears the packs of a stage behind the part. Once is enough, since no copy writes there.
  __device__ void clear(Pack<T>* packs) const {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (first_of(i) >= n) packs[pack_of(i)] = {};
    }
  }

  // Adds a row to the columns' sums, and returns the row's sums over this thread's elements; `product` lacks
  // its factor rstd.
  __device__ GradientSums add(const Pack<T>* x_packs, const Pack<T>* dout_packs, float mean, float rstd) {
    GradientSums sums = {};
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (ends_before(i)) break;
      Pack<T> x = read(x_packs, i), dout = read(dout_packs, i);
      const Pack<T> weight = weight_of(i);
      if (!LINED && ragged) {  // 0 for elements outside of the part
        mask_beside(x, first_of(i), n);
        mask_beside(dout, first_of(i), n);
      }
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float distance = CENTERED ? to_float(x[j]) - mean : to_float(x[j]);
        const float gradient = to_float(dout[j]);
        dweight[i][j] = fmaf(gradient * rstd, distance, dweight[i][j]);
        if constexpr (CENTERED) dbias[i][j] += gradient;
        const float g = gradient * to_float(weight[j]);
        sums.product = fmaf(g, distance, sums.product);
        if constexpr (CENTERED) sums.plain += g;
        // Keeps the compiler from deferring these: the factors would take registers until the sums are sent.
        asm volatile("" : "+f"(dweight[i][j]));
        if constexpr (CENTERED) asm volatile("" : "+f"(dbias[i][j]));
      }
    }
    return sums;
  }

  // Writes dx, from the block's first element on. `means` are the whole row's sums divided by N.
  __device__ void write(const Pack<T>* x_packs, const Pack<T>* dout_packs, const Pack<T>* added_packs, T* dx,
                        float mean, float rstd, GradientSums means) {
    const float of_distance = -means.product * rstd * rstd * rstd, of_all = -means.plain * rstd;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (ends_before(i)) break;
      const Pack<T> x = read(x_packs, i), dout = read(dout_packs, i), weight = weight_of(i);
      const Pack<T> added = added_packs ? read(added_packs, i) : Pack<T>{};
      Pack<T> results;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float distance = CENTERED ? to_float(x[j]) - mean : to_float(x[j]);
        const float rest = fmaf(distance, of_distance, of_all + to_float(added[j]));
        set(results, j, from_float<T>(fmaf(to_float(dout[j]) * rstd, to_float(weight[j]), rest)));
      }
      int first = first_of(i);
      asm volatile("" : "+r"(first));  // against CSE: addresses kept from row to row take registers
      if (!LINED) {
        store_pack(dx, first, n, true, results);
      } else if (first < n) {
        __stwb(reinterpret_cast<uint4*>(dx + first), results.words);
      }
    }
  }
};

// Persistent clusters over split rows. A cluster takes one group of rows; these have the same skew, which is
// also that of dout, dadded and dx. The loop has no barrier of the block: a warp waits for a row's copies,
// and for the sums of the row before. A cluster leaves the partial sums of its rows for dweight and dbias in
// the workspace.
template <typename T, int PACKS, bool CENTERED, bool LINED>
__device__ void backward_rows_ahead(const NormBackwardArgs& args, const AheadShape& shape,
                                    const RowGroups& groups, float* workspace) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE;
  // The stages, [stages, matrices, pitch] packs, then the slots for rows' sums, [TURNS, count].
  extern __shared__ __align__(128) uint4 room[];
  __shared__ __align__(16) float statistics[MOST_STAGES][CENTERED ? 2 : 1][4];  // 16 bytes with the row's
  __shared__ uint64_t arrived[MOST_STAGES];  // a phase completes when a row's copies have arrived
  __shared__ uint32_t readers[MOST_STAGES];  // warps that are done with the row
  __shared__ uint64_t complete[TURNS];       // a phase completes when all parts of a row's sums have arrived
  const int N = static_cast<int>(args.N), warps = blockDim.x / 32;
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const int blocks = shape.blocks, stages = shape.stages, rank = rank_in_cluster(blocks);
  const int cluster = blockIdx.x / blocks, clusters = gridDim.x / blocks;
  const int first = groups.first(cluster), step = groups.step(cluster), end = groups.end(cluster);
  const int matrices = args.dadded ? 3 : 2, pitch = shape.pitch();
  Pack<T>* const ring = reinterpret_cast<Pack<T>*>(room);
  const int count = blocks * warps;
  GradientSums* const parts = reinterpret_cast<GradientSums*>(room + stages * matrices * pitch);
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

  const int row_skew = LINED ? 0 : skew_of(static_cast<const T*>(args.x) + first * args.stride_xm);
  const Parts<T> columns_of{N, row_skew, shape.each};
  const int start = columns_of.start(rank), n = columns_of.count(rank), skew = rank == 0 ? row_skew : 0;

  // The place of a row's part in a stage: as far behind a line's start as in global memory, because such
  // copies are faster. Only an address' low bits count, so 32 bits are enough.
  const auto held = [&](int matrix, const void* rows, int64_t stride, int index, int stage) {
    Pack<T>* const place = ring + (stage * matrices + matrix) * pitch;
    if (LINED) return place;
    const uint32_t address =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(rows)) +
        (static_cast<uint32_t>(index) * static_cast<uint32_t>(stride) + start) * sizeof(T);
    return place + address / 16 % LINE_PACKS;
  };
  // Which of the four floats in its 16 bytes a row's statistic is.
  const auto place_of = [](const float* one) { return reinterpret_cast<uintptr_t>(one) % 16 / 4; };
  // Copies a row to a stage; one thread calls it. Whole packs are copied: elements outside of the row in its
  // first and last 16 bytes can be read, as in load_touching_packs, and are masked later.
  const auto fetch = [&](int index, int stage) {
    const uint32_t bytes = cdiv(n + skew, SIZE) * sizeof(uint4);
    mbarrier_arrive_expect_tx(&arrived[stage], matrices * bytes + sizeof(statistics[0]));
    const auto copy_statistic = [&](int which, const float* one) {
      bulk_load(statistics[stage][which], one - place_of(one), 16, &arrived[stage]);
    };
    copy_statistic(0, args.rstd + index);
    if constexpr (CENTERED) copy_statistic(1, args.mean + index);
    if (bytes == 0) return;
    const auto copy = [&](int matrix, const void* rows, int64_t stride) {
      bulk_load(held(matrix, rows, stride, index, stage),
                static_cast<const T*>(rows) + index * stride + (start - skew), bytes, &arrived[stage]);
    };
    copy(0, args.x, args.stride_xm);
    copy(1, args.dout, args.stride_dm);
    if (args.dadded) copy(2, args.dadded, args.stride_am);
  };
  if (threadIdx.x == 0) {
    int index = first;
    for (int stage = 0; stage < stages && index < end; ++stage, index += step) fetch(index, stage);
  }

  AheadColumns<T, PACKS, CENTERED, LINED> columns(args.weight, start, n, skew);
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
      Pack<T>* const x = held(0, args.x, args.stride_xm, index, stage);
      Pack<T>* const dout = held(1, args.dout, args.stride_dm, index, stage);
      statistics_of(index, stage, &mean, &rstd);
      const GradientSums sums = lanes_sum(columns.add(x, dout, mean, rstd));
      // Slot reuse: a warp that sends the sums of row r has received all sums of row r - 2. Every warp sent
      // those after it had read the sums of row r - 4, so the slot of row r - 4 is free.
      const int place = turn % TURNS;
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
      const int place = (turn - 1) % TURNS;
      const uint32_t sent = (turn - 1) / TURNS % 2;
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
                    args.dadded ? held(2, args.dadded, args.stride_am, row, before) : nullptr,
                    static_cast<T*>(args.dx) + row * args.N + start, mean, rstd,
                    {sums.product / static_cast<float>(N), sums.plain / static_cast<float>(N)});
      // The last warp to finish with the row starts the copy of the next row to its stage.
      __syncwarp();  // for all lanes to be done with the row
      const int next = index + (stages - 1) * step;
      if (lane_id == 0 && is_last_of(&readers[before], warps) && next < end) fetch(next, before);
    }
    before = stage_now;
  }

  if (workspace == nullptr) return;
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
            which == 0 ? columns.dweight[i][j] : columns.dbias[CENTERED ? i : 0][CENTERED ? j : 0];
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

// backward_by_lanes with PREFETCH, but the kernel that adds the partial sums may be set up early.
template <typename T, int LANES, int PACKS, bool CENTERED, bool WHOLE>
__device__ void backward_by_lanes_early(const NormBackwardArgs& args, float* workspace) {
#if __CUDA_ARCH__ >= 900
  if (workspace) allow_dependent_launch();
  backward_by_lanes<T, LANES_THREADS, LANES, PACKS, CENTERED, WHOLE, true>(args, workspace);
#endif
}

constexpr int SUM_WARPS = 32, SUM_BATCH = 8;  // most warps of a block that adds sums; loads of a thread

// As add_partial_sums, but a thread has the loads of SUM_BATCH groups under way at once.
template <typename T>
__device__ void add_partial_sums_at_once(const float* workspace, int groups, int64_t N, T* dweight,
                                         T* dbias) {
#if __CUDA_ARCH__ >= 900
  __shared__ float sums[SUM_WARPS][SUM_COLUMNS];
  const int lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32, warps = blockDim.x / 32;
  const int which = blockIdx.y;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * SUM_COLUMNS + lane_id;
  const int taken = col < N ? groups : 0;
  const float* partial = workspace + (which * groups + warp_id) * N + col;
  const int64_t step = warps * N;
  wait_for_previous_kernel();  // for the groups' sums
  float sum = 0.0f;
  for (int first = warp_id; first < taken; first += SUM_BATCH * warps, partial += SUM_BATCH * step) {
    float of_group[SUM_BATCH];
#pragma unroll
    for (int i = 0; i < SUM_BATCH; ++i) {
      of_group[i] = first + i * warps < taken ? partial[i * step] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < SUM_BATCH; ++i) sum += of_group[i];
  }
  sums[warp_id][lane_id] = sum;
  __syncthreads();  // for every warp's groups
  T* out = which == 0 ? dweight : dbias;
  if (warp_id > 0 || col >= N || out == nullptr) return;
  for (int warp = 1; warp < warps; ++warp) sum += sums[warp][lane_id];
  out[col] = from_float<T>(sum);
#endif
}

// As launch_with_sums, but with programmatic dependent launch: sum_kernel is set up while the kernel before
// it ends, which must call allow_dependent_launch.
template <typename T, typename Launch>
void launch_with_early_sums(const NormBackwardArgs& args, int groups, bool centered, Launch launch,
                            void (*sum_kernel)(const float*, int, int64_t, T*, T*)) {
  const int outputs = centered ? 2 : 1;
  float* const workspace = workspace_of(args, groups, outputs);
  launch(workspace);
  if (!wants_sums(args)) return;
  const dim3 grid(static_cast<unsigned>(cdiv(args.N, SUM_COLUMNS)), outputs);
  launch_early(grid, std::min<int64_t>(cdiv(groups, SUM_BATCH), SUM_WARPS) * 32, args.stream, sum_kernel,
               static_cast<const float*>(workspace), groups, args.N, static_cast<T*>(args.dweight),
               static_cast<T*>(args.dbias));
}

// Whether rows with the same index have the same skew in x, dout, dadded and dx.
template <typename T>
bool are_alike(const NormBackwardArgs& args) {
  const auto like_x = [&](const void* rows, int64_t stride) {
    return (reinterpret_cast<uintptr_t>(rows) - reinterpret_cast<uintptr_t>(args.x)) % 16 == 0 &&
           (stride - args.stride_xm) % Pack<T>::SIZE == 0;
  };
  return like_x(args.dout, args.stride_dm) && like_x(args.dx, args.N) &&
         (!args.dadded || like_x(args.dadded, args.stride_am));
}

// The smallest cluster whose threads hold FEW_PACKS of a row. Threads hold MANY_PACKS in the largest cluster,
// and also in clusters whose rows have several skews: the number of groups is rounded to a multiple of the
// period, and the fewer threads a block has, the more clusters run, and the less rounding costs. `blocks` is
// 0 if rows are too long.
template <typename T>
AheadShape ahead_shape(const NormBackwardArgs& args) {
  const int64_t packs = packs_of<T>(args);
  const int matrices = args.dadded ? 3 : 2;
  int blocks = 1;
  while (blocks < MOST_CLUSTER_BLOCKS && packs > blocks * FEW_PACKS * AHEAD_THREADS) blocks *= 2;
  const int64_t each = cdiv(packs, blocks);
  if (each > MANY_PACKS * AHEAD_THREADS) return {};
  const bool many = blocks == MOST_CLUSTER_BLOCKS || (blocks > 1 && skew_period<T>(args.stride_xm) > 1);
  const int of_thread = many ? MANY_PACKS : FEW_PACKS;
  const int threads = static_cast<int>(cdiv(cdiv(each, of_thread), 32) * 32);
  const auto is_lined = [](const void* rows, int64_t stride) {
    return reinterpret_cast<uintptr_t>(rows) % LINE_BYTES == 0 && stride % LINE_ELEMENTS<T> == 0;
  };
  const bool lined = each % LINE_PACKS == 0 && is_lined(args.x, args.stride_xm) &&
                     is_lined(args.dout, args.stride_dm) && is_lined(args.dadded, args.stride_am) &&
                     is_lined(args.dx, args.N);
  AheadShape shape{blocks, static_cast<int>(each), of_thread, threads, 1, lined};
  const int row = shape.ring(matrices);
  const int under_way = static_cast<int>(cdiv(BYTES_UNDER_WAY, row * shape.sm_blocks()));
  shape.stages = std::min(LEAST_STAGES - 1 + under_way, MOST_STAGES);
  if (shape.ring(matrices) > RING_BYTES) shape.lined = false;  // stages as large as the parts
  return shape.ring(matrices) <= RING_BYTES ? shape : AheadShape{};
}

// Divides M rows into groups, if `resident` clusters run at once. If rounding to a multiple of `period` would
// leave more than an eighth of the GPU idle, up to MOST_WAVES times as many groups run, in as many waves.
// Else, if `uneven` groups are allowed and rows are many, the last 32nd of the rows goes to small groups, for
// the SMs that finish first: not all are equally fast. No groups if too few clusters run.
inline RowGroups row_groups(int64_t M, int resident, int period, bool uneven) {
  int waves = 1;
  const auto groups = [&] { return groups_for(M, waves * resident, period); };
  while (waves < MOST_WAVES && groups() < M && groups() * 8 < waves * resident * 7) ++waves;
  const int64_t large = groups();
  if (large == 0) return {};
  const auto of = [&](int64_t large, int64_t many, int64_t few) {
    return RowGroups{static_cast<int>(M), static_cast<int>(large), static_cast<int>(many),
                     static_cast<int>(few), period};
  };
  if (uneven && waves == 1 && M >= MANY_ROWS * large) {
    const int64_t many = M * 31 / 32 / large, small = cdiv(large, 2 * period) * period;
    return of(large, many, cdiv(M - large * many, small));
  }
  // The fewest groups that need as many rounds: they leave fewer partial sums.
  const int64_t many = cdiv(M, large);
  return of(large < M ? cdiv(cdiv(M, many), period) * period : M, many, 1);
}

// Launches kernel(args, shape, groups, workspace), compiled for the PACKS and LINED of `shape`, and then
// sum_kernel. False if the GPU has no room for the cluster, or runs too few clusters for rows of so many
// skews.
template <typename T, typename Kernel>
bool launch_ahead(const NormBackwardArgs& args, const AheadShape& shape, Kernel* kernel, bool centered,
                  void (*sum_kernel)(const float*, int, int64_t, T*, T*)) {
  if (shape.blocks == 0 || most_shared_memory() < AHEAD_BYTES) return false;
  allow_shared_memory(kernel, AHEAD_BYTES);
  // At least a block's share of the SM, which keeps further blocks off it: they would have more bytes under
  // way.
  const int ring = std::max(shape.ring(args.dadded ? 3 : 2), RING_BYTES / shape.sm_blocks());
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), shape.blocks, shape.threads,
                       ring + shape.sums(), args.stream);
  const RowGroups groups =
      row_groups(args.M, launch.resident(), skew_period<T>(args.stride_xm), shape.sm_blocks() > 1);
  if (groups.large == 0) return false;
  launch_with_early_sums<T>(
      args, groups.count(), centered,
      [&](float* workspace) { launch(groups.count(), kernel, args, shape, groups, workspace); }, sum_kernel);
  return true;
}
