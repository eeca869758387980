// Tiles of short rows in shared memory: a kernel of layer_norm's v12 and rms_norm's v07, for rows that are no
// whole packs, or that start differently in several matrices. Global memory is read and written by whole
// packs, shared memory element by element. Terms: docs/glossary.md.
#pragma once

#include <type_traits>

#include "lib/held.cuh"
#include "lib/row_tile.cuh"
#include "norm_row.cuh"

constexpr int NORM_TILE_THREADS = 128;
constexpr int NORM_TILE_BYTES = 16 * 1024;        // of all tiles of a block, unless its warps need more
constexpr int64_t LONGEST_NORM_TILE_ROW = 4096;   // bytes
constexpr int MOST_NORM_TILE_MEMORY = 96 * 1024;  // bytes: four tiles with a row a warp, weights and biases
constexpr int FEW_ITEMS = 16;                     // most elements of a lane where a warp has several rows
// Blocks that an SM must have room for, which bounds a thread's registers.
template <int ITEMS>
constexpr int NORM_TILE_BLOCKS = ITEMS <= FEW_ITEMS ? 9
                                 : ITEMS <= 32      ? 7
                                                    : 5;

// A weight and a bias; of rms_norm a weight alone. In fp32, since several rows take each.
template <Norm NORM>
using TileFactor = std::conditional_t<NORM == Norm::LAYER, float2, float>;

// Where a block's tiles of `rows` rows begin in its shared memory, and behind them weights and biases, in
// words of 16 bytes. Results lie in place of what they are made of, if they lie alike in global memory.
struct NormTiles {
  int rows, x, residual, out, added, factors;

  template <typename T>
  static NormTiles of(const NormArgs& args, int rows) {
    const int N = static_cast<int>(args.N), dense = tile_words<T>(rows, N, args.N);
    const auto replaces = [&](const void* result, const void* input, int64_t stride) {
      return stride == args.N && skewed_alike<T>(input, stride, result, args.N);
    };
    NormTiles at = {};
    int end = tile_words<T>(rows, N, args.stride_xm);
    const auto take = [&](int words) { return std::exchange(end, end + words); };
    at.rows = rows;
    if (args.residual) at.residual = take(tile_words<T>(rows, N, args.stride_rm));
    at.out = replaces(args.out, args.x, args.stride_xm) ? at.x : take(dense);
    if (args.residual) {
      at.added = replaces(args.added, args.residual, args.stride_rm) ? at.residual : take(dense);
    }
    at.factors = end;
    return at;
  }
};

// A block has `at.rows` rows, LANES lanes one of them at a time, of at most LANES * ITEMS elements.
template <typename T, int LANES, int ITEMS, Norm NORM>
__device__ void normalise_by_tile(const NormArgs& args, const NormTiles& at) {
  constexpr bool CENTERED = NORM == Norm::LAYER;
  constexpr int THREADS = NORM_TILE_THREADS;
  constexpr int STEP = ITEMS > FEW_ITEMS ? 4 : 2;  // items from one check for the row's end to the next
  extern __shared__ uint4 words[];
  const int N = static_cast<int>(args.N);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * at.rows;
  const int count = static_cast<int>(min(static_cast<int64_t>(at.rows), args.M - first));
  const NormRow<T> top(args, first);
  const auto rows_of = [&](const void* matrix, int64_t stride, uint4* to) {
    const T* const begin = static_cast<const T*>(matrix);
    const T *const top_row = begin + first * stride, *const end = begin + (args.M - 1) * stride + N;
    return TileRows<T, THREADS>{top_row, stride, N, count, to, end};
  };
  const TileRows<T, THREADS> xs = rows_of(args.x, args.stride_xm, words + at.x);
  const TileRows<T, THREADS> residuals = rows_of(args.residual, args.stride_rm, words + at.residual);
  const TileOut<T, THREADS> outs{top.out, N, count, words + at.out};
  const TileOut<T, THREADS> sums{top.added, N, count, words + at.added};
  auto* const factors = reinterpret_cast<TileFactor<NORM>*>(words + at.factors);
  const bool has_residual = args.residual != nullptr, affine = args.weight || args.bias;

  xs.load();
  if (has_residual) residuals.load();
  cp_async_commit_group();
  if (affine) {  // while the tiles travel
    for (int column = threadIdx.x; column < N; column += THREADS) {
      const float weight = top.weight ? to_float(top.weight[column]) : 1.0f;
      if constexpr (CENTERED) {
        factors[column] = make_float2(weight, top.bias ? to_float(top.bias[column]) : 0.0f);
      } else {
        factors[column] = weight;
      }
    }
  }
  cp_async_wait_group<0>();  // for this thread's copies
  __syncthreads();           // for all threads' copies, and for weights and biases

  // Calls work(item, column, whether the row has the column), the last one a constant but at the row's end.
  const int lane = threadIdx.x % LANES;
  const auto each_item = [&](auto work) {
#pragma unroll
    for (int i = 0; i < ITEMS; i += STEP) {
      if ((i + STEP) * LANES <= N) {
#pragma unroll
        for (int j = i; j < i + STEP; ++j) work(j, j * LANES + lane, true);
      } else if (i * LANES < N) {
#pragma unroll
        for (int j = i; j < i + STEP; ++j) work(j, j * LANES + lane, j * LANES + lane < N);
      }
    }
  };
  // The shuffles need all 32 lanes, so rows past the last one are computed, too, of whatever is in their
  // place.
  for (int r = threadIdx.x / LANES; r < at.rows; r += THREADS / LANES) {
    float values[ITEMS], sum = 0.0f, squares = 0.0f;
    const auto add = [&](float value) {
      if (CENTERED) sum += value;
      if (!CENTERED) squares = fmaf(value, value, squares);
    };
    const T* const x = xs[r];
    if (has_residual) {
      const T* const residual = residuals[r];
      T* const added = sums[r];
      each_item([&](int i, int column, bool inside) {
        values[i] = 0.0f;
        if (inside) values[i] = to_float(from_float<T>(to_float(x[column]) + to_float(residual[column])));
      });
      // Stored after all loads: the sum may lie in place of the residual, and each load would wait for the
      // stores before it.
      each_item([&](int i, int column, bool inside) {
        if (inside) added[column] = from_float<T>(values[i]);
        add(values[i]);
      });
    } else {
      each_item([&](int i, int column, bool inside) {
        values[i] = inside ? to_float(x[column]) : 0.0f;
        add(values[i]);
      });
    }
    const float mean = CENTERED ? lanes_sum<LANES>(sum) / static_cast<float>(N) : 0.0f;
    if (CENTERED) {
      each_item([&](int i, int, bool inside) {
        values[i] -= mean;
        if (inside) squares = fmaf(values[i], values[i], squares);
      });
    }
    const float rstd = rstd_of(lanes_sum<LANES>(squares), N, args.eps);
    if (lane == 0 && r < count) {
      if (CENTERED) args.mean[first + r] = mean;
      args.rstd[first + r] = rstd;
    }
    T* const out = outs[r];
    if (affine) {
      each_item([&](int i, int column, bool inside) {
        if (!inside) return;
        const TileFactor<NORM> factor = factors[column];
        if constexpr (CENTERED) {
          out[column] = from_float<T>(fmaf(values[i] * rstd, factor.x, factor.y));
        } else {
          out[column] = from_float<T>(values[i] * rstd * factor);
        }
      });
    } else {
      each_item([&](int i, int column, bool inside) {
        if (inside) out[column] = from_float<T>(values[i] * rstd);
      });
    }
  }
  __syncthreads();  // waits for all rows of the tiles
  outs.store();
  if (has_residual) sums.store();
}

// Lanes a row: the fewest, but enough for rows a multiple of 8, 16, ... elements apart: these start in few of
// shared memory's banks, for which many groups of few lanes would queue.
template <typename T>
int tile_lanes(int64_t N) {
  const int64_t bytes = N * static_cast<int64_t>(sizeof(T));
  const int64_t apart = std::min<int64_t>(bytes & -bytes, LINE_BYTES);  // a power of two
  int lanes = 1;
  while (lanes < 32 && (lanes * FEW_ITEMS < N || 8 * lanes < apart)) lanes *= 2;
  return lanes;
}

// Launches kernel_of(LANES, ITEMS), which are integral constants. False if a row is too long, or if the grid
// would have too many blocks.
template <typename T, Norm NORM, typename KernelOf>
bool launch_by_tile(const NormArgs& args, KernelOf kernel_of) {
  if (args.N * static_cast<int64_t>(sizeof(T)) > LONGEST_NORM_TILE_ROW) return false;
  const int lanes = tile_lanes<T>(args.N), groups = NORM_TILE_THREADS / lanes;
  const int64_t least_blocks = 2 * int64_t{multiprocessor_count()};
  const int64_t each = std::min<int64_t>(NORM_TILE_BYTES / (16 * NormTiles::of<T>(args, groups).factors),
                                         cdiv(args.M, groups * least_blocks));
  const auto tiles = NormTiles::of<T>(args, groups * static_cast<int>(std::max<int64_t>(1, each)));
  const int64_t blocks = cdiv(args.M, tiles.rows);
  if (blocks > INT32_MAX) return false;
  const int64_t factors = args.weight || args.bias ? args.N : 0;
  const int64_t bytes = 16 * tiles.factors + factors * static_cast<int64_t>(sizeof(TileFactor<NORM>));
  const auto launch = [&](auto its_lanes, auto items) {
    const auto kernel = kernel_of(its_lanes, items);
    allow_shared_memory(kernel, MOST_NORM_TILE_MEMORY);
    kernel<<<static_cast<unsigned>(blocks), NORM_TILE_THREADS, bytes, args.stream>>>(args, tiles);
    CUDA_CHECK(cudaGetLastError());
    return true;
  };
  const auto by_lanes = [&]<int... SHIFTS>(std::integer_sequence<int, SHIFTS...>) {
    constexpr std::integral_constant<int, FEW_ITEMS> ITEMS;
    return ((lanes == 1 << SHIFTS && args.N <= FEW_ITEMS << SHIFTS &&
             launch(std::integral_constant<int, 1 << SHIFTS>{}, ITEMS)) ||
            ...);
  };
  const auto by_items = [&]<int... ITEMS>(std::integer_sequence<int, ITEMS...>) {
    constexpr std::integral_constant<int, 32> WARP;
    return ((args.N <= WARP * ITEMS && launch(WARP, std::integral_constant<int, ITEMS>{})) || ...);
  };
  constexpr int MOST_ITEMS = LONGEST_NORM_TILE_ROW / static_cast<int>(sizeof(T)) / 32;
  return by_lanes(std::make_integer_sequence<int, 6>{}) ||
         by_items(std::integer_sequence<int, 32, MOST_ITEMS>{});
}
