// Tiles of rows that are no whole packs, or whose skew differs between the matrices: a kernel of the norms'
// dispatching backward steps. Tiles travel to shared memory and back by whole packs, whatever rows they hold.
// There rows are read and written element by element. Terms: docs/glossary.md.
#pragma once

#include <utility>

#include "lib/ptx/hopper.cuh"
#include "norm_backward_ahead_columns.cuh"
#include "norm_backward_early.cuh"

// Threads of a block, in teams of a warp or more.
template <int ROW_THREADS>
constexpr int TILE_BLOCK = ROW_THREADS < 256 ? 256 : ROW_THREADS;
constexpr int TILE_STAGES = 2;  // one tile is worked on, one travels
// Elements of a row that a thread may have: few where a warp or less has a row, so that an SM has more
// blocks. More than MANY_BACKWARD_ITEMS are read again for dx: registers hold their column sums alone.
constexpr int FEW_BACKWARD_ITEMS = 8, MANY_BACKWARD_ITEMS = 20, MOST_BACKWARD_ITEMS = 40;
template <int ROW_THREADS, int ITEMS>
constexpr int TILE_BLOCKS = ITEMS == FEW_BACKWARD_ITEMS ? 3 : 512 / TILE_BLOCK<ROW_THREADS>;  // of an SM
constexpr int TILE_SM_BYTES = 216 * 1024;  // of shared memory, of an SM
// So many bytes between rows are fetched with them: their sectors are fetched anyway.
constexpr int64_t SHORT_GAP = 32;

constexpr int round_up(int64_t value, int multiple) {
  return static_cast<int>(cdiv(value, multiple) * multiple);
}

// Rows of one operand in a stage, in bytes. A statistic counts as a row of one element. A tile's rows are one
// piece, as they lie in global memory, or if they lie far apart there, pieces of their own.
struct TiledRows {
  const char *rows, *end;  // of the operand
  int64_t stride;
  int length;  // of a row; 0 if there is no such operand
  bool one_piece;
  int line;         // a piece keeps its offset within so many bytes, which makes copies faster
  int each;         // from row to row in a stage, but for their offsets
  uint32_t offset;  // from row to row, by which offsets grow
  int place;        // in a stage

  // Rows of `elements` elements of `size` bytes.
  TiledRows(const void* operand, int64_t M, int64_t elements, int64_t stride_elements, int size)
      : rows(static_cast<const char*>(operand)),
        end(rows + ((M - 1) * stride_elements + elements) * size),
        stride(stride_elements * size),
        length(operand ? static_cast<int>(elements * size) : 0) {
    const int64_t gap = stride - length;
    one_piece = gap >= 0 && gap <= std::max<int64_t>(SHORT_GAP, length / 4);
    line = (one_piece ? elements > 1 : length >= LINE_BYTES) ? LINE_BYTES : 16;
    each = one_piece ? static_cast<int>(stride) : round_up(length + line - 1, line);
    offset = one_piece ? 0 : static_cast<uint32_t>(stride);
  }
  // The bytes of `count` rows.
  int bytes(int count) const {
    if (length == 0) return 0;
    return round_up((count - 1) * int64_t{each} + length + line - 1, LINE_BYTES);
  }
  // Where row r of the tile that starts with row `first` is in a stage. Low bits of addresses are enough.
  __device__ int at(int64_t first, int r) const {
    const uint32_t low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(rows)) +
                         static_cast<uint32_t>(first) * static_cast<uint32_t>(stride);
    return place + r * each + static_cast<int>((low + r * offset) & (line - 1));
  }
};

enum Operand { TILED_X, TILED_DOUT, TILED_ADDED, TILED_RSTD, TILED_MEAN, OPERANDS };

// The tiles of a launch. A team's shared memory is its stages and a tile of dx; the block's begins with its
// weights.
struct BackwardTiles {
  TiledRows operands[OPERANDS];
  int rows, count;  // of a tile; of tiles, which 32 bits count since each has several packs of dx
  int stage = 0;    // bytes
  int team, weights;

  // For elements of `size` bytes, and ROW_THREADS threads that have a row.
  BackwardTiles(const NormBackwardArgs& args, int size, int row_threads, int rows)
      : operands{{args.x, args.M, args.N, args.stride_xm, size},
                 {args.dout, args.M, args.N, args.stride_dm, size},
                 {args.dadded, args.M, args.N, args.stride_am, size},
                 {args.rstd, args.M, 1, 1, sizeof(float)},
                 {args.mean, args.M, 1, 1, sizeof(float)}},
        rows(rows),
        count(static_cast<int>(cdiv(args.M, rows))) {
    for (TiledRows& its : operands) {
      its.place = stage;
      stage += its.bytes(rows);
    }
    team = TILE_STAGES * stage + round_up(rows * args.N * size + 16, LINE_BYTES);
    weights = round_up(round_up(args.N, 2 * row_threads) * sizeof(float), LINE_BYTES);
  }
  int bytes(int teams) const { return weights + teams * team; }
};

// Starts the copies of a tile to a stage; a whole warp calls it. Lane l has operand l % 8, of which it copies
// the one piece, or every fourth row. Whole packs are copied: where the last one may end behind the operand,
// the lane copies its elements itself.
__device__ inline void fetch_tile(const BackwardTiles& tiles, int64_t M, int tile, char* stage,
                                  uint64_t* arrived) {
#if __CUDA_ARCH__ >= 900
  const int lane_id = threadIdx.x % 32, operand = lane_id % 8;
  const TiledRows& its = tiles.operands[min(operand, OPERANDS - 1)];
  const int64_t first = int64_t{tile} * tiles.rows;
  const int count = static_cast<int>(min(M - first, int64_t{tiles.rows}));
  const int pieces = operand >= OPERANDS || its.length == 0 ? 0 : its.one_piece ? 1 : count;
  const int length = its.length + (its.one_piece ? (count - 1) * its.each : 0);
  uint32_t bytes = 0;
  for (int piece = lane_id / 8; piece < pieces; piece += 4) {
    const char* const row = its.rows + (first + piece) * its.stride;
    const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16), elements_end = skew + length;
    const int above = (elements_end + 15) / 16 * 16;
    const int copied = row - skew + above <= its.end ? above : elements_end / 16 * 16;
    char* const place = stage + its.at(first, piece) - skew;
    if (copied > 0) bulk_load(place, row - skew, copied, arrived);
    bytes += copied;
    if (copied < elements_end) {
#pragma unroll 1
      for (int at = max(copied, skew); at < elements_end; at += 2)
        *reinterpret_cast<uint16_t*>(place + at) = *reinterpret_cast<const uint16_t*>(row - skew + at);
      fence_proxy_async();  // before later copies to this stage
    }
  }
  bytes = __reduce_add_sync(~0u, bytes);
  __syncwarp();  // for the elements that lanes have copied themselves
  if (lane_id == 0) mbarrier_arrive_expect_tx(arrived, bytes);
#endif
}

// Stores a tile of dx by a team: `count` elements from `to` on, which lie in shared memory as far behind a
// pack's start. The elements before the first whole pack, and those behind the last one, go to a thread each.
template <int TEAM, typename T>
__device__ void store_tile(T* to, const uint4* from, int count) {
  constexpr int SIZE = Pack<T>::SIZE;
  const int skew = skew_of(to), packs_end = (skew + count) / SIZE, thread = threadIdx.x % TEAM;
  for (int pack = thread + (skew > 0); pack < packs_end; pack += TEAM)
    __stwb(reinterpret_cast<uint4*>(to - skew) + pack, from[pack]);
  const int head = min((SIZE - skew) % SIZE, count), tail = max(packs_end * SIZE - skew, head);
  const int single = thread < SIZE ? thread : tail + thread - SIZE;
  if (thread < SIZE ? single < head : thread < 2 * SIZE && single < count)
    to[single] = reinterpret_cast<const T*>(from)[skew + single];
}

// A team of one or more warps takes one tile after the other. ROW_THREADS threads have a row, element by
// element, and the same columns in all rows; several groups of a team's warp have rows of their own where
// ROW_THREADS are less than a warp. While a team works on a tile, the next one travels.
template <typename T, int ROW_THREADS, int ITEMS, Norm NORM, Affine AFFINE>
__device__ void backward_tiles(const NormBackwardArgs& args, const BackwardTiles& tiles, float* workspace) {
#if __CUDA_ARCH__ >= 900
  constexpr bool CENTERED = NORM == Norm::LAYER;
  constexpr bool GIVEN = AFFINE == Affine::GIVEN, HOLDS = ITEMS <= MANY_BACKWARD_ITEMS;
  constexpr int HELD = HOLDS ? ITEMS : 1;
  constexpr int TEAM = ROW_THREADS < 32 ? 32 : ROW_THREADS, TEAMS = TILE_BLOCK<ROW_THREADS> / TEAM,
                WARPS = TEAM / 32;
  constexpr int LANES = ROW_THREADS < 32 ? ROW_THREADS : 32, GROUPS = TEAM / ROW_THREADS;
  extern __shared__ __align__(128) char tile_room[];
  __shared__ uint64_t arrived[TEAMS][TILE_STAGES];  // a phase completes when a tile's copies have arrived
  __shared__ GradientSums parts[TEAMS][2][WARPS];   // of a row, in turns
  const int N = static_cast<int>(args.N), thread = threadIdx.x % ROW_THREADS;
  const int team = threadIdx.x / TEAM, warp = threadIdx.x % TEAM / 32;  // of the block, of the team
  const int group = threadIdx.x % TEAM / ROW_THREADS;
  if (workspace) allow_dependent_launch();

  if (threadIdx.x < TEAMS * TILE_STAGES) {
    mbarrier_init(&arrived[0][0] + threadIdx.x, 1);
    fence_mbarrier_init();
  }
  float* const weights = reinterpret_cast<float*>(tile_room);
  // Threads read weights up to the second column beyond a row's end.
  const int weighted = GIVEN ? round_up(N, 2 * ROW_THREADS) : 0;
  for (int col = threadIdx.x; col < weighted; col += TILE_BLOCK<ROW_THREADS>) {
    const T* const given = static_cast<const T*>(args.weight);
    weights[col] = col >= N ? 0.0f : given ? to_float(given[col]) : 1.0f;
  }
  __syncthreads();  // for the weights, and for the barriers to be initialised

  const int step = gridDim.x * TEAMS;
  int tile = blockIdx.x * TEAMS + team;
  char* const mine = tile_room + tiles.weights + team * tiles.team;
  char* const out = mine + TILE_STAGES * tiles.stage;
  for (int stage = 0; warp == 0 && stage < TILE_STAGES; ++stage) {
    if (tile + stage * step < tiles.count)
      fetch_tile(tiles, args.M, tile + stage * step, mine + stage * tiles.stage, &arrived[team][stage]);
  }
  // For all threads of the team, and for what they wrote to shared memory.
  const auto meet = [&] {
    if constexpr (WARPS == 1) __syncwarp();
    if constexpr (WARPS > 1) named_barrier_sync(1 + team, TEAM);
  };

  const float share = 1.0f / args.N;
  float dweight[GIVEN ? ITEMS : 1] = {}, dbias[GIVEN && CENTERED ? ITEMS : 1] = {};
  int stage = 0, turn = 0;
  for (uint32_t parity = 0; tile < tiles.count; tile += step) {
    const int64_t first = int64_t{tile} * tiles.rows;
    const int count = static_cast<int>(min(args.M - first, int64_t{tiles.rows}));
    char* const staged = mine + stage * tiles.stage;
    T* const dx = static_cast<T*>(args.dx) + first * N;
    const auto row_of = [&](int operand, int r) { return staged + tiles.operands[operand].at(first, r); };
    mbarrier_wait_parity(&arrived[team][stage], parity);  // for the copies of this tile
    for (int r = group; r - group < count; r += GROUPS) {
      // Groups past the last row stay for the shuffles, without elements.
      const bool inside = GROUPS == 1 || r < count;
      const int row = inside ? r : count - 1, columns = inside ? N - thread : 0;
      const float rstd = inside ? *reinterpret_cast<const float*>(row_of(TILED_RSTD, row)) : 0.0f;
      const float mean = CENTERED && inside ? *reinterpret_cast<const float*>(row_of(TILED_MEAN, row)) : 0.0f;
      const T* const x = reinterpret_cast<const T*>(row_of(TILED_X, row)) + thread;
      const T* const dout = reinterpret_cast<const T*>(row_of(TILED_DOUT, row)) + thread;
      // Of the elements in registers; g has the factor rstd.
      float distance[HELD], g[HELD];
      const auto distance_of = [&](int i, bool has) {
        const float value = has ? to_float(x[i * ROW_THREADS]) : 0.0f;
        return CENTERED ? value - mean : value;
      };
      const auto g_of = [&](int i, float scaled) {
        // Rounded before the mean is subtracted, so that dx is exactly 0 where a row has one element.
        return GIVEN ? __fmul_rn(scaled, weights[i * ROW_THREADS + thread]) : scaled;
      };
      const auto gradient_of = [&](int i, bool has) { return has ? to_float(dout[i * ROW_THREADS]) : 0.0f; };
      GradientSums sums = {};
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        // Every second element: with a test each, every load would be waited for.
        if (i % 2 == 0 && i * ROW_THREADS >= N) break;
        const bool has = i * ROW_THREADS < columns;
        const float gradient = gradient_of(i, has), its_distance = distance_of(i, has);
        const float scaled = __fmul_rn(gradient, rstd), its_g = g_of(i, scaled);
        if constexpr (GIVEN) dweight[i] = fmaf(scaled, its_distance, dweight[i]);
        if constexpr (GIVEN && CENTERED) dbias[i] += gradient;
        sums.product = fmaf(its_g, its_distance, sums.product);
        if constexpr (CENTERED) sums.plain += its_g;
        if constexpr (HOLDS) distance[i] = its_distance, g[i] = its_g;
      }
      sums = lanes_sum<LANES>(sums);
      if constexpr (WARPS > 1) {
        // A slot is free: all threads that read it have come to the meeting of the row before.
        if (threadIdx.x % 32 == 0) parts[team][turn][warp] = sums;
        meet();  // for the sums of all warps
        sums = lanes_sum<WARPS>(parts[team][turn][threadIdx.x % WARPS]);
        turn ^= 1;
      }
      const float mean_g = sums.plain * share, of_distance = -sums.product * share * rstd * rstd;
      const T* const added = reinterpret_cast<const T*>(row_of(TILED_ADDED, row)) + thread;
      T* const results = reinterpret_cast<T*>(out) + skew_of(dx) + row * N + thread;
      const auto write = [&](auto adds) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          if (i % 2 == 0 && i * ROW_THREADS >= N) break;
          const bool has = i * ROW_THREADS < columns;
          const float its_distance = HOLDS ? distance[HOLDS ? i : 0] : distance_of(i, has);
          const float its_g = HOLDS ? g[HOLDS ? i : 0] : g_of(i, __fmul_rn(gradient_of(i, has), rstd));
          float result = fmaf(its_distance, of_distance, CENTERED ? __fsub_rn(its_g, mean_g) : its_g);
          if (adds && has) result += to_float(added[i * ROW_THREADS]);
          if (has) results[i * ROW_THREADS] = from_float<T>(result);
        }
      };
      args.dadded ? write(std::true_type{}) : write(std::false_type{});
    }
    meet();  // for the tile's dx, and for all threads to be done with the stage
    if (warp == 0 && tile + TILE_STAGES * step < tiles.count)
      fetch_tile(tiles, args.M, tile + TILE_STAGES * step, staged, &arrived[team][stage]);
    store_tile<TEAM>(dx, reinterpret_cast<const uint4*>(out), count * N);
    // Before the next tile's dx is written. Several warps meet at its first row's sums, too.
    if constexpr (WARPS == 1) __syncwarp();
    if (++stage == TILE_STAGES) stage = 0, parity ^= 1;
  }

  if constexpr (GIVEN) {
    if (workspace == nullptr) return;
    // Groups of a warp add their columns' sums by shuffles; teams add them one after the other.
#pragma unroll
    for (int distance = ROW_THREADS; distance < 32; distance *= 2) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        dweight[i] += __shfl_xor_sync(~0u, dweight[i], distance);
        if constexpr (CENTERED) dbias[i] += __shfl_xor_sync(~0u, dbias[i], distance);
      }
    }
    float* const sums = reinterpret_cast<float*>(tile_room);  // [2, N]
    for (int adding = 0; adding < TEAMS; ++adding) {
      __syncthreads();  // for all teams' tiles to be done, then for the sums of the team before
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int col = i * ROW_THREADS + thread;
        if (team != adding || group > 0 || col >= N) continue;
        sums[col] = adding > 0 ? sums[col] + dweight[i] : dweight[i];
        if constexpr (CENTERED) sums[N + col] = adding > 0 ? sums[N + col] + dbias[i] : dbias[i];
      }
    }
    __syncthreads();  // for the sums of all teams
    for (int col = threadIdx.x; col < N; col += TILE_BLOCK<ROW_THREADS>) {
      partial_sums(workspace, 0, gridDim.x, N, blockIdx.x)[col] = sums[col];
      if constexpr (CENTERED) partial_sums(workspace, 1, gridDim.x, N, blockIdx.x)[col] = sums[N + col];
    }
  }
#endif
}

// Launches kernel_of(ROW_THREADS, ITEMS)(args, tiles, workspace), which are integral constants, with the
// fewest threads that have a row in FEW_BACKWARD_ITEMS each or, of whole warps, in MANY_BACKWARD_ITEMS, of a
// block in MOST_BACKWARD_ITEMS; then add_kernel. Tiles have as many rows as shared memory holds, but no more
// than leave two for each team. False if a row is too long.
template <typename T, typename KernelOf>
bool launch_tiles(const NormBackwardArgs& args, bool centered, KernelOf kernel_of,
                  void (*add_kernel)(const float*, int, int64_t, T*, T*)) {
  if (most_shared_memory() < TILE_SM_BYTES) return false;
  const auto launch = [&](auto row_threads, auto items) {
    constexpr int THREADS = TILE_BLOCK<row_threads>, TEAMS = THREADS / std::max<int>(row_threads, 32);
    constexpr int SM_BLOCKS = TILE_BLOCKS<row_threads, items>;
    constexpr int ROWS = std::max<int>(32 / row_threads, 1);  // of a team at once
    constexpr int SHARE = TILE_SM_BYTES / SM_BLOCKS;
    const auto tiles_of = [&](int64_t rows) {
      return BackwardTiles(args, sizeof(T), row_threads, static_cast<int>(rows));
    };
    const int64_t teams = int64_t{multiprocessor_count()} * SM_BLOCKS * TEAMS;
    int64_t rows = ROWS;
    while (rows * TILE_STAGES * teams < args.M && tiles_of(rows + ROWS).bytes(TEAMS) <= SHARE) rows += ROWS;
    const BackwardTiles tiles = tiles_of(rows);
    const int bytes = tiles.bytes(TEAMS);
    if (bytes > TILE_SM_BYTES) return false;
    const auto kernel = kernel_of(row_threads, items);
    allow_shared_memory(kernel, TILE_SM_BYTES);
    ClusterLaunch occupancy(reinterpret_cast<const void*>(kernel), 1, THREADS, bytes, args.stream);
    const int blocks = static_cast<int>(std::min<int64_t>(occupancy.resident(), cdiv(tiles.count, TEAMS)));
    if (blocks == 0) return false;
    launch_with_early_sums<T>(
        args, blocks, centered,
        [&](float* workspace) {
          kernel<<<blocks, THREADS, bytes, args.stream>>>(args, tiles, workspace);
          CUDA_CHECK(cudaGetLastError());
        },
        add_kernel);
    return true;
  };
  const auto by_threads = [&]<int ITEMS, int... THREADS>(std::integral_constant<int, ITEMS> items,
                                                         std::integer_sequence<int, THREADS...>) {
    return ((args.N <= THREADS * ITEMS && launch(std::integral_constant<int, THREADS>{}, items)) || ...);
  };
  return by_threads(std::integral_constant<int, FEW_BACKWARD_ITEMS>{},
                    std::integer_sequence<int, 1, 2, 4, 8, 16, 32>{}) ||
         by_threads(std::integral_constant<int, MANY_BACKWARD_ITEMS>{},
                    std::integer_sequence<int, 32, 64, 128, 256, 512>{}) ||
         by_threads(std::integral_constant<int, MOST_BACKWARD_ITEMS>{}, std::integer_sequence<int, 512>{});
}
