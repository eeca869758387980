// Rows that are split over blocks by two launches: the kernels of layer_norm_backward's v07 and
// rms_norm_backward's v05 for few rows that no cluster holds. The first launch leaves the sums of each part
// of a row. In the second a block has a range of columns, and goes through rows: it merges their sums, writes
// dx, and keeps the sums of its columns. Terms: docs/glossary.md.
#pragma once

#include "norm_backward_ahead.cuh"
#include "norm_words.cuh"

// Columns and rows of a thread at once, in the first launch: single elements of two bytes take a register
// each.
template <typename T, int WIDTH>
constexpr int TERM_COLUMNS = WIDTH > 1 && sizeof(T) == 2 ? 8 : 4;
constexpr int TERM_ROWS = 3;
// Rows of a thread at once, in the second launch.
template <typename T, int WIDTH>
constexpr int BACKWARD_ROWS_AT_ONCE = sizeof(T) == 4 || WIDTH == 2 ? 3 : (WIDTH == 1 ? 2 : 4);
// Blocks that an SM runs at once, in the first launch and in the second; and those of a launch, for each SM,
// if there is work for so many.
constexpr int SUMS_BLOCKS = 4, BACKWARD_WRITE_BLOCKS = 3;
constexpr int BACKWARD_SPLIT_BLOCKS_PER_SM = 8;
constexpr int MERGED_ROWS = 64;  // whose sums a block merges before it goes through them
constexpr int LEAST_ROWS = 16;   // of a slice: its column sums travel once more

// First launch: a block leaves the sums of a part, `each` columns, of up to TERM_ROWS rows in `sums`
// [M, parts]. It loads the part's weights once for its rows. Blocks that follow one another have the same
// part of all rows, so that other rows' weights are in L2, and so are all rows' last columns in the end.
template <typename T, Norm NORM, int WIDTH>
__device__ void leave_gradient_sums(const NormBackwardArgs& args, unsigned groups, unsigned parts,
                                    int64_t each, GradientSums* sums) {
#if __CUDA_ARCH__ >= 900
  constexpr bool CENTERED = NORM == Norm::LAYER;
  constexpr int COLUMNS = TERM_COLUMNS<T, WIDTH>, TILE = STRIP_THREADS * COLUMNS;
  using Words = RowWords<T, WIDTH, COLUMNS>;
  __shared__ GradientSums of_warps[TERM_ROWS][32];
  allow_dependent_launch();
  const unsigned group = blockIdx.x % groups, part = blockIdx.x / groups;
  const int64_t first_row = args.M * group / groups, end = min(args.N, (part + 1) * each);
  const int rows = static_cast<int>(args.M * (group + 1) / groups - first_row);
  float means[TERM_ROWS], rstds[TERM_ROWS];
#pragma unroll
  for (int r = 0; r < TERM_ROWS; ++r) {
    const int64_t row = first_row + min(r, rows - 1);
    means[r] = CENTERED ? args.mean[row] : 0.0f;
    rstds[r] = args.rstd[row];
  }
  GradientSums mine[TERM_ROWS] = {};
  for (int64_t start = part * each; start < end; start += TILE) {
    const WordPlace<WIDTH> place(end, start, TILE);
    Words weights, x[TERM_ROWS], dout[TERM_ROWS];
    weights.load(static_cast<const T*>(args.weight), place, args.weight != nullptr, 1.0f);
#pragma unroll
    for (int r = 0; r < TERM_ROWS; ++r) {
      x[r].load(static_cast<const T*>(args.x) + (first_row + r) * args.stride_xm, place, r < rows);
      dout[r].load(static_cast<const T*>(args.dout) + (first_row + r) * args.stride_dm, place, r < rows);
    }
    __syncwarp();  // or the compiler issues the loads of later rows behind the work on the first
#pragma unroll
    for (int r = 0; r < TERM_ROWS; ++r) {
      GradientSums of_tile = {};  // a chain of its own for each tile, so that terms of one size are added
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        const float g = dout[r][j] * weights[j];  // 0 where the row has no column
        of_tile.product = fmaf(g, (CENTERED ? x[r][j] - means[r] : x[r][j]) * rstds[r], of_tile.product);
        if (CENTERED) of_tile.plain += g;
      }
      mine[r].product += of_tile.product;
      mine[r].plain += of_tile.plain;
    }
  }
#pragma unroll
  for (int r = 0; r < TERM_ROWS; ++r) {
    if (r == rows) break;
    const GradientSums its = block_sum(mine[r], of_warps[r]);
    if (threadIdx.x == 0) sums[(first_row + r) * parts + part] = its;
  }
#endif
}

// A row's numbers: its statistics, and its sums divided by N.
struct alignas(16) RowNumbers {
  float mean, rstd, product, plain;
};

// The rows of the second launch's blocks. A block has the columns of one of `strips` strips, in rows
// slice * rows and on, as many as `rows`, with slice = blockIdx.x / strips.
struct Slices {
  unsigned strips;
  int count;
  int64_t rows;
};

// A row's sums from those of its parts, in a fixed order. A whole warp calls it, and all lanes get them.
__device__ inline GradientSums merged_sums(const GradientSums* of_parts, int parts) {
  float2 found[MOST_ROW_PARTS / 32];
#pragma unroll
  for (int i = 0; i < MOST_ROW_PARTS / 32; ++i) {
    const int part = static_cast<int>(threadIdx.x) % 32 + 32 * i;
    found[i] = part < parts ? __ldcg(reinterpret_cast<const float2*>(of_parts) + part) : make_float2(0, 0);
  }
  GradientSums whole = {};
#pragma unroll
  for (const float2& its : found) {
    whole.product += its.x;
    whole.plain += its.y;
  }
  return lanes_sum(whole);
}

// Second launch. With one slice the column sums are the gradients; with several they are partial sums, in
// `workspace`. The last columns come first, because what the first launch read last is still in L2.
template <typename T, Norm NORM, int WIDTH>
__device__ void write_split_gradient(const NormBackwardArgs& args, const Slices& slices, int parts,
                                     const GradientSums* sums, float* workspace) {
#if __CUDA_ARCH__ >= 900
  constexpr bool CENTERED = NORM == Norm::LAYER;
  constexpr int WARPS = STRIP_THREADS / 32, ROWS = BACKWARD_ROWS_AT_ONCE<T, WIDTH>;
  using Words = RowWords<T, WIDTH, THREAD_COLUMNS>;
  __shared__ RowNumbers numbers[MERGED_ROWS];
  allow_dependent_launch();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32;
  const unsigned strip = slices.strips - 1 - blockIdx.x % slices.strips, slice = blockIdx.x / slices.strips;
  const WordPlace<WIDTH> place(args.N, strip * int64_t{STRIP_COLUMNS}, STRIP_COLUMNS);
  const int64_t begin = slice * slices.rows, end = min(args.M, begin + slices.rows);
  float dweight[THREAD_COLUMNS] = {}, dbias[THREAD_COLUMNS] = {};
  Words weights;
  weights.load(static_cast<const T*>(args.weight), place, args.weight != nullptr, 1.0f);
  wait_for_previous_kernel();  // for the rows' sums

  for (int64_t base = begin; base < end; base += MERGED_ROWS) {
    const int count = static_cast<int>(min(end - base, int64_t{MERGED_ROWS}));
    if (base > begin) __syncthreads();  // for all to be done with the numbers of the rows before
    if (const int r = threadIdx.x; r < count) {
      numbers[r].mean = CENTERED ? args.mean[base + r] : 0.0f;
      numbers[r].rstd = args.rstd[base + r];
    }
    for (int r = warp_id; r < count; r += WARPS) {
      const GradientSums its = merged_sums(sums + (base + r) * parts, parts);
      const float N = static_cast<float>(args.N);
      if (lane_id == 0) numbers[r].product = its.product / N, numbers[r].plain = its.plain / N;
    }
    __syncthreads();  // for the numbers of all rows
    for (int first = 0; first < count; first += ROWS) {
      Words x[ROWS], dout[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int64_t index = base + first + r;
        const bool wanted = first + r < count;
        x[r].load(static_cast<const T*>(args.x) + index * args.stride_xm, place, wanted);
        dout[r].load(static_cast<const T*>(args.dout) + index * args.stride_dm, place, wanted);
      }
      __syncwarp();  // or the compiler issues the loads of later rows behind the work on the first
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        // A row that is not wanted changes no sum, for its elements and its rstd are 0, and is not stored.
        const bool wanted = first + r < count;
        const int64_t index = base + first + r;
        RowNumbers row = numbers[min(first + r, count - 1)];
        row.rstd = wanted ? row.rstd : 0.0f;
        Words added;  // of one row at a time, or registers spill
        added.load(static_cast<const T*>(args.dadded) + index * args.stride_am, place,
                   wanted && args.dadded != nullptr);
        float results[THREAD_COLUMNS];
#pragma unroll
        for (int j = 0; j < THREAD_COLUMNS; ++j) {
          const float gradient = dout[r][j], g = gradient * weights[j];
          const float unit = (CENTERED ? x[r][j] - row.mean : x[r][j]) * row.rstd;
          dweight[j] = fmaf(gradient, unit, dweight[j]);
          if (CENTERED) dbias[j] += gradient;
          results[j] = fmaf(row.rstd, g - row.plain - unit * row.product, added[j]);
        }
        store_words(static_cast<T*>(args.dx) + index * args.N, place, wanted, results);
      }
    }
  }

  if (slices.count > 1) {
    if (workspace == nullptr) return;
    store_words(partial_sums(workspace, 0, slices.count, args.N, slice), place, true, dweight);
    if (CENTERED) store_words(partial_sums(workspace, 1, slices.count, args.N, slice), place, true, dbias);
  } else {
    if (args.dweight) store_words(static_cast<T*>(args.dweight), place, true, dweight);
    if (CENTERED && args.dbias) store_words(static_cast<T*>(args.dbias), place, true, dbias);
  }
#endif
}

// Calls launch(WIDTH) with the elements of the widest word that all rows allow.
template <typename T, typename Launch>
bool with_width(const NormBackwardArgs& args, Launch launch) {
  return choose_width<T>({args.x, args.dout, args.weight, args.dadded, args.dx, args.dweight, args.dbias},
                         {args.N, args.stride_xm, args.stride_dm, args.dadded ? args.stride_am : 0}, launch);
}

// Launches sums_kernel(args, groups, parts, each, sums), whose body is leave_gradient_sums, then
// write_kernel(args, slices, parts, sums, workspace), whose body is write_split_gradient, and for several
// slices add_kernel, which adds their column sums. False if that would be too many blocks.
template <typename T>
bool launch_split_gradient(const NormBackwardArgs& args, bool centered,
                           void (*sums_kernel)(NormBackwardArgs, unsigned, unsigned, int64_t, GradientSums*),
                           void (*write_kernel)(NormBackwardArgs, Slices, int, const GradientSums*, float*),
                           void (*add_kernel)(const float*, int, int64_t, T*, T*)) {
  const int64_t wanted = BACKWARD_SPLIT_BLOCKS_PER_SM * multiprocessor_count();  // blocks of a launch
  const int64_t strips = cdiv(args.N, STRIP_COLUMNS);
  const int64_t groups = cdiv(args.M, TERM_ROWS);  // of rows, in the first launch
  const int64_t of_part = cdiv(strips, std::clamp<int64_t>(wanted / groups, 1, MOST_ROW_PARTS));
  const int64_t parts = cdiv(strips, of_part);
  const int64_t most_slices = cdiv(args.M, LEAST_ROWS);
  const int64_t rows = cdiv(args.M, std::clamp<int64_t>(wanted / strips, 1, most_slices));
  const Slices slices{static_cast<unsigned>(strips), static_cast<int>(cdiv(args.M, rows)), rows};
  if (args.M * parts > INT32_MAX || strips * slices.count > INT32_MAX) return false;

  auto* const sums =
      static_cast<GradientSums*>(args.memory->workspace(args.M * parts * sizeof(GradientSums)));
  sums_kernel<<<static_cast<unsigned>(groups * parts), STRIP_THREADS, 0, args.stream>>>(
      args, static_cast<unsigned>(groups), static_cast<unsigned>(parts), of_part * STRIP_COLUMNS, sums);
  CUDA_CHECK(cudaGetLastError());
  const auto write = [&](float* workspace) {
    launch_early(static_cast<unsigned>(strips * slices.count), STRIP_THREADS, args.stream, write_kernel, args,
                 slices, static_cast<int>(parts), static_cast<const GradientSums*>(sums), workspace);
  };
  if (slices.count > 1) {
    launch_with_early_sums<T>(args, slices.count, centered, write, add_kernel);
  } else {
    write(nullptr);
  }
  return true;
}
