// Rows that are split over blocks by two launches: the kernels of layer_norm's v12 and rms_norm's v07 for
// rows that no cluster holds. The first launch leaves the statistics of each part of a row, the second merges
// them and writes. Terms: docs/glossary.md.
#pragma once

#include "lib/early.cuh"
#include "lib/ptx/hopper.cuh"
#include "norm_statistics.cuh"
#include "norm_words.cuh"

// Columns of a thread at once, in the first launch: single elements of two bytes take a register each, and a
// residual takes as many as x.
template <typename T, int WIDTH, Residual RESIDUAL>
constexpr int MOMENT_COLUMNS =
    (WIDTH > 1 && sizeof(T) == 2 ? 32 : 16) / (RESIDUAL == Residual::ADDED ? 2 : 1);
// Rows of a thread at once, in the second launch.
template <typename T, int WIDTH>
constexpr int ROWS_AT_ONCE = sizeof(T) == 4 || WIDTH == 1 ? 4 : 8;
// Blocks that an SM runs at once, in the first launch and in the second.
constexpr int MOMENTS_BLOCKS = 4;
template <int WIDTH>
constexpr int WRITE_BLOCKS = WIDTH == 1 ? 3 : 4;
constexpr int MOST_GROUP_ROWS = 16;       // that a block of the second launch writes
constexpr int SPLIT_BLOCKS_PER_SM = 16;   // if there is work for so many
constexpr int MOST_STRIP_BLOCKS_SM = 16;  // of the second launch, which then go through several strips

// Count, mean, and the sum of squared distances from this mean. For rms_norm the mean is 0, and the
// count of no use.
struct alignas(16) Moments {
  float count = 0.0f, mean = 0.0f, squares = 0.0f;
};

// Chan's formula.
template <Norm NORM>
__device__ Moments merged_moments(Moments a, Moments b) {
  if (NORM == Norm::RMS) return {0.0f, 0.0f, a.squares + b.squares};
  if (b.count == 0.0f) return a;
  if (a.count == 0.0f) return b;  // or a distance that overflows would count 0 times infinity
  const float count = a.count + b.count, distance = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + distance * share, a.squares + b.squares + distance * distance * a.count * share};
}

// Merges the moments of a warp's first LANES lanes as a tree, always the same one. Lane 0 gets the result.
template <Norm NORM, int LANES>
__device__ Moments merged_lanes(Moments mine) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    mine = merged_moments<NORM>(mine, {__shfl_down_sync(0xffffffff, mine.count, distance),
                                       __shfl_down_sync(0xffffffff, mine.mean, distance),
                                       __shfl_down_sync(0xffffffff, mine.squares, distance)});
  }
  return mine;
}

// The moments of a thread's columns that lie in the row; the others are 0. The mean first, then the squares.
template <Norm NORM, typename T, int WIDTH, int COLUMNS>
__device__ Moments moments_of(const RowWords<T, WIDTH, COLUMNS>& x, const WordPlace<WIDTH>& place) {
  constexpr bool CENTERED = NORM == Norm::LAYER;
  constexpr int WORDS = COLUMNS / WIDTH;
  const bool whole = place.end == STRIP_THREADS * COLUMNS;  // of all threads, so that no warp is divided
  Moments mine;
  if (CENTERED) {
    int words = 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      float sum = 0.0f;  // a chain of its own for each word, so that additions overlap
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) sum += x.words[i][j];
      mine.mean += sum;
      words += place.has(i);
    }
    mine.count = static_cast<float>(words * WIDTH);
    if (whole) {
      mine.mean *= 1.0f / COLUMNS;
    } else {
      mine.mean = words > 0 ? mine.mean / mine.count : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      const float distance = x.words[i][j] - mine.mean;
      squares = fmaf(distance, distance, squares);
    }
    mine.squares += whole || place.has(i) ? squares : 0.0f;
  }
  return mine;
}

// First launch: a block leaves the moments of its part of a row, `each` columns, in `moments` [M, parts].
// With a residual it also stores the sum to `added`. Blocks that follow one another have the same part of all
// rows, so that all rows' last columns are in L2 in the end.
template <typename T, Norm NORM, int WIDTH, Residual RESIDUAL>
__device__ void leave_moments(const NormArgs& args, unsigned parts, int64_t each, Moments* moments) {
#if __CUDA_ARCH__ >= 900
  constexpr int COLUMNS = MOMENT_COLUMNS<T, WIDTH, RESIDUAL>, TILE = STRIP_THREADS * COLUMNS;
  constexpr int WARPS = STRIP_THREADS / 32;
  __shared__ Moments of_warps[WARPS];
  allow_dependent_launch();
  const unsigned rows = static_cast<unsigned>(args.M), part = blockIdx.x / rows;
  const int64_t index = blockIdx.x % rows, end = min(args.N, (part + 1) * each);
  Moments mine;
  for (int64_t start = part * each; start < end; start += TILE) {
    const WordPlace<WIDTH> place(end, start, TILE);
    RowWords<T, WIDTH, COLUMNS> x;
    x.load(static_cast<const T*>(args.x) + index * args.stride_xm, place, true);
    if constexpr (RESIDUAL == Residual::ADDED) {
      RowWords<T, WIDTH, COLUMNS> residual;
      residual.load(static_cast<const T*>(args.residual) + index * args.stride_rm, place, true);
      __syncwarp();  // or the compiler issues later loads behind the work on the first
      x.add(residual);
      x.store(static_cast<T*>(args.added) + index * args.N, place);
    } else {
      __syncwarp();
    }
    mine = merged_moments<NORM>(mine, moments_of<NORM>(x, place));
  }
  mine = merged_lanes<NORM, 32>(mine);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();  // for every warp's moments
  if (threadIdx.x >= 32) return;
  mine = merged_lanes<NORM, WARPS>(threadIdx.x < WARPS ? of_warps[threadIdx.x] : Moments{});
  if (threadIdx.x == 0) moments[index * parts + part] = mine;
#endif
}

// The moments of a whole row from those of its parts, in a fixed order. A whole warp calls it, and all lanes
// get them. Means enter as distances from the first part's, or those far from zero would lose digits.
template <Norm NORM>
__device__ Moments merged_row(const Moments* of_parts, int parts, int64_t N) {
  constexpr bool CENTERED = NORM == Norm::LAYER;
  constexpr int MOST = MOST_ROW_PARTS / 32;
  float4 found[MOST];
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    const int part = static_cast<int>(threadIdx.x) % 32 + 32 * i;
    found[i] = part < parts ? __ldcg(reinterpret_cast<const float4*>(of_parts) + part)
                            : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  Moments whole;
  whole.count = static_cast<float>(N);
  if (CENTERED) {
    const float first = __shfl_sync(0xffffffff, found[0].y, 0);
    float distances = 0.0f;
#pragma unroll
    for (const float4& its : found) {
      // Where a lane has no part, the distance may overflow, and 0 times infinity is no number.
      if (its.x > 0.0f) distances += its.x * (its.y - first);
    }
    whole.mean = first + lanes_sum(distances) / whole.count;
  }
#pragma unroll
  for (const float4& its : found) {
    const float distance = its.y - whole.mean;
    whole.squares += its.z;
    if (CENTERED && its.x > 0.0f) whole.squares += its.x * distance * distance;
  }
  whole.squares = lanes_sum(whole.squares);
  return whole;
}

// Second launch: a block merges the moments of some rows, and writes strips of the same columns of all of
// them, whose weights and biases stay in registers. `groups` blocks share the rows. The last columns come
// first, because what the first launch read last is still in L2.
template <typename T, Norm NORM, int WIDTH>
__device__ void write_split(const NormArgs& args, unsigned parts, unsigned groups, const Moments* moments) {
#if __CUDA_ARCH__ >= 900
  constexpr bool CENTERED = NORM == Norm::LAYER;
  constexpr int ROWS = ROWS_AT_ONCE<T, WIDTH>;
  using Words = RowWords<T, WIDTH, THREAD_COLUMNS>;
  __shared__ float means[MOST_GROUP_ROWS], rstds[MOST_GROUP_ROWS];
  const unsigned group = blockIdx.x % groups, first_strip = blockIdx.x / groups, step = gridDim.x / groups;
  const int64_t first_row = args.M * group / groups;
  const int rows = static_cast<int>(args.M * (group + 1) / groups - first_row);
  const T* const inputs = static_cast<const T*>(args.added ? args.added : args.x);
  const int64_t stride = args.added ? args.N : args.stride_xm;
  wait_for_previous_kernel();  // for the moments, and the sums x + residual
  for (int r = threadIdx.x / 32; r < rows; r += STRIP_THREADS / 32) {
    const Moments whole =
        merged_row<NORM>(moments + (first_row + r) * parts, static_cast<int>(parts), args.N);
    if (threadIdx.x % 32 > 0) continue;
    means[r] = whole.mean;
    rstds[r] = rstd_of(whole.squares, args.N, args.eps);
    if (first_strip > 0) continue;
    if (CENTERED) args.mean[first_row + r] = means[r];
    args.rstd[first_row + r] = rstds[r];
  }
  __syncthreads();  // for all rows' means and rstds
  for (int64_t strip = cdiv(args.N, STRIP_COLUMNS) - 1 - first_strip; strip >= 0; strip -= step) {
    const WordPlace<WIDTH> place(args.N, strip * STRIP_COLUMNS, STRIP_COLUMNS);
    Words weights, biases;
    weights.load(static_cast<const T*>(args.weight), place, args.weight != nullptr, 1.0f);
    biases.load(static_cast<const T*>(args.bias), place, CENTERED && args.bias != nullptr);
    for (int first = 0; first < rows; first += ROWS) {
      Words x[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        x[r].load(inputs + (first_row + first + r) * stride, place, first + r < rows);
      }
      __syncwarp();  // or the compiler issues the loads of later rows behind the work on the first
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int row = min(first + r, rows - 1);
        const float mean = means[row], rstd = rstds[row];
        float results[THREAD_COLUMNS];
#pragma unroll
        for (int j = 0; j < THREAD_COLUMNS; ++j) {
          const float unit = (CENTERED ? x[r][j] - mean : x[r][j]) * rstd;
          results[j] = CENTERED ? fmaf(unit, weights[j], biases[j]) : unit * weights[j];
        }
        store_words(static_cast<T*>(args.out) + (first_row + row) * args.N, place, first + r < rows, results);
      }
    }
  }
#endif
}

// Calls launch(WIDTH) with the elements of the widest word that all rows allow.
template <typename T, typename Launch>
bool with_width(const NormArgs& args, Launch launch) {
  return choose_width<T>({args.x, args.residual, args.weight, args.bias, args.out, args.added},
                         {args.N, args.stride_xm, args.residual ? args.stride_rm : 0}, launch);
}

// Launches moments_kernel(args, parts, each, moments), whose body is leave_moments, and write_kernel(args,
// parts, groups, moments), whose body is write_split. False if that would be too many blocks.
template <typename T>
bool launch_split(const NormArgs& args, void (*moments_kernel)(NormArgs, unsigned, int64_t, Moments*),
                  void (*write_kernel)(NormArgs, unsigned, unsigned, const Moments*)) {
  const int64_t sms = multiprocessor_count(), enough = SPLIT_BLOCKS_PER_SM * sms;  // blocks
  const int64_t strips = cdiv(args.N, STRIP_COLUMNS);
  const int64_t of_part = cdiv(strips, std::clamp<int64_t>(enough / args.M, 1, MOST_ROW_PARTS));
  const int64_t parts = cdiv(strips, of_part), blocks = args.M * parts;
  const int64_t groups = std::max(std::min(cdiv(enough, strips), args.M), cdiv(args.M, MOST_GROUP_ROWS));
  const int64_t of_block = cdiv(strips * groups, MOST_STRIP_BLOCKS_SM * sms);  // strips
  const int64_t write_blocks = cdiv(strips, of_block) * groups;
  if (std::max(blocks, write_blocks) > INT32_MAX) return false;
  auto* const moments = static_cast<Moments*>(args.memory->workspace(blocks * sizeof(Moments)));
  moments_kernel<<<static_cast<unsigned>(blocks), STRIP_THREADS, 0, args.stream>>>(
      args, static_cast<unsigned>(parts), of_part * STRIP_COLUMNS, moments);
  CUDA_CHECK(cudaGetLastError());
  launch_early(static_cast<unsigned>(write_blocks), STRIP_THREADS, args.stream, write_kernel, args,
               static_cast<unsigned>(parts), static_cast<unsigned>(groups),
               static_cast<const Moments*>(moments));
  return true;
}
