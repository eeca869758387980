// Rows that are split over blocks by two launches: the kernels of layer_norm_backward's v07 and
// rms_norm_backward's v05 for few rows that no cluster holds. The first launch leaves the sums of each part
// of a row. In the second a block has a range of columns, and goes through rows: it merges their sums, writes
// dx, and keeps the sums of its columns. Terms: docs/glossary.md.
#pragma once

#include "norm_backward_ahead.cuh"
#include "norm_shifted.cuh"

constexpr int SPLIT_THREADS = 256, SPLIT_PACKS = 2;      // packs of a thread at once, in the first launch
constexpr int SPLIT_TILE = SPLIT_THREADS * SPLIT_PACKS;  // packs; a part is a multiple
constexpr int SPLIT_BLOCKS_PER_SM = 8;                   // if there is work for so many
constexpr int ROWS_AT_ONCE = 2;                          // of a thread in the second launch
constexpr int MERGED_ROWS = 64;  // whose sums a block merges before it goes through them
constexpr int LEAST_ROWS = 16;   // of a slice: its column sums travel once more
template <Skews SKEWS>
constexpr int SPLIT_BLOCKS = SKEWS == Skews::ALIKE ? 3 : 2;  // that an SM runs at once, in either launch

// First launch: a block leaves the sums of its part of a row in `sums` [M, parts]. Packs are laid out on the
// multiples of 16 bytes of x.
template <typename T, bool CENTERED, Skews SKEWS>
__device__ void leave_gradient_sums(const NormBackwardArgs& args, unsigned parts, int each,
                                    GradientSums* sums) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, STEP = SPLIT_THREADS * SIZE;
  __shared__ GradientSums of_warps[32];
  allow_dependent_launch();
  const int64_t index = blockIdx.x / parts;
  const int skew = skew_of(static_cast<const T*>(args.x) + index * args.stride_xm);
  const RowPart<T> part(args.N, skew, blockIdx.x % parts, each);
  const float mean = CENTERED ? args.mean[index] : 0.0f, rstd = args.rstd[index];
  GradientSums mine = {};
  for (int first = threadIdx.x * SIZE; first < part.end; first += SPLIT_PACKS * STEP) {
    using Packs = ShiftedPacks<T, SKEWS, SPLIT_PACKS>;
    const Packs xs({args.x, index, args.M, args.N, args.stride_xm, part}, part, first, STEP);
    const Packs douts({args.dout, index, args.M, args.N, args.stride_dm, part}, part, first, STEP);
    const Packs weights({args.weight, args.N, part}, part, first, STEP);
#pragma unroll
    for (int i = 0; i < SPLIT_PACKS; ++i) {
      const Pack<T> its_x = xs[i], its_dout = douts[i], its_weight = weights[i];
      GradientSums of_pack = {};  // a chain of its own for each pack
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float g = float_of(its_dout, j) * (args.weight ? float_of(its_weight, j) : 1.0f);
        const float distance = CENTERED ? float_of(its_x, j) - mean : float_of(its_x, j);
        of_pack.product = fmaf(g, distance * rstd, of_pack.product);
        if (CENTERED) of_pack.plain += g;
      }
      mine.product += of_pack.product;
      mine.plain += of_pack.plain;
    }
  }
  mine = block_sum(mine, of_warps);
  if (threadIdx.x == 0) sums[blockIdx.x] = mine;
#endif
}

// A row's numbers: its statistics, and its sums divided by N.
struct alignas(16) RowNumbers {
  float mean, rstd, product, plain;
};

// The rows of the second launch's blocks. A block has the columns of strip blockIdx.x % strips, in rows
// slice * rows and on, as many as `rows`, with slice = blockIdx.x / strips.
struct Slices {
  unsigned strips;
  int count;
  int64_t rows;
};

// The sums over some rows of a thread's columns, and what of a row it needs for them and for dx.
template <typename T, bool CENTERED, Skews SKEWS>
struct SplitColumns {
  static constexpr int SIZE = Pack<T>::SIZE;
  const RowPart<T>& part;
  int first;
  Pack<T> weights;
  float dweight[SIZE] = {}, dbias[CENTERED ? SIZE : 1] = {};

  // Adds a row's pack to the sums; returns its pack of dx.
  __device__ Pack<T> add(const Pack<T>& x, const Pack<T>& dout, const Pack<T>& added, const RowNumbers& row) {
    float results[SIZE];
    keep_packed(weights);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      const float gradient = float_of(dout, j), g = gradient * float_of(weights, j);
      const float unit = (CENTERED ? float_of(x, j) - row.mean : float_of(x, j)) * row.rstd;
      dweight[j] = fmaf(gradient, unit, dweight[j]);
      if constexpr (CENTERED) dbias[j] += gradient;
      results[j] = fmaf(row.rstd, g - row.plain - unit * row.product, float_of(added, j));
    }
    Pack<T> packed;
    round_to(packed, results);
    return packed;
  }

  // Writes a sum of each column, to a gradient of type T or to partial sums.
  template <typename Out>
  __device__ void write(Out* to, const float (&sums)[SIZE]) const {
    Out* const place = to + part.start + first;
    const bool wide = part.count(first) == SIZE && reinterpret_cast<uintptr_t>(place) % 16 == 0;
    constexpr int OF_PACK = Pack<Out>::SIZE;
#pragma unroll
    for (int start = 0; start < SIZE; start += OF_PACK) {
      Pack<Out> packed;
#pragma unroll
      for (int j = 0; j < OF_PACK; ++j) {
        set(packed, j, from_float<Out>(sums[start + j]));
        if (!wide && part.has(first + start + j)) place[start + j] = packed[j];
      }
      if (wide) __stwb(reinterpret_cast<uint4*>(place + start), packed.words);
    }
  }
};

// Second launch. With one slice the column sums are the gradients; with several they are partial sums, in
// `workspace`.
template <typename T, bool CENTERED, Skews SKEWS>
__device__ void write_split(const NormBackwardArgs& args, const Slices& slices, int parts,
                            const GradientSums* sums, float* workspace) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, WARPS = SPLIT_THREADS / 32;
  using Packs = ShiftedPacks<T, SKEWS, 1>;
  __shared__ RowNumbers numbers[MERGED_ROWS];
  allow_dependent_launch();
  const int warp_id = threadIdx.x / 32, lane_id = threadIdx.x % 32, first = threadIdx.x * SIZE;
  const unsigned strip = blockIdx.x % slices.strips, slice = blockIdx.x / slices.strips;
  const RowPart<T> part(args.N, 0, strip, SPLIT_THREADS);
  SplitColumns<T, CENTERED, SKEWS> columns{part, first};
  columns.weights = Packs({args.weight, args.N, part}, part, first, 0)[0];
  if (args.weight == nullptr) {
#pragma unroll
    for (int j = 0; j < SIZE; ++j) set(columns.weights, j, from_float<T>(1.0f));
  }
  wait_for_previous_kernel();  // for the rows' sums

  // From the last row back, because what the first launch read last is still in L2.
  const int64_t begin = slice * slices.rows;
  for (int64_t end = min(args.M, begin + slices.rows); end > begin; end -= MERGED_ROWS) {
    const int64_t base = max(begin, end - MERGED_ROWS);
    const int count = static_cast<int>(end - base);
    __syncthreads();  // for all to be done with the numbers of the rows before
    for (int r = warp_id; r < count; r += WARPS) {
      GradientSums its = {};
      for (int other = lane_id; other < parts; other += 32) {
        its.product += sums[(base + r) * parts + other].product;
        its.plain += sums[(base + r) * parts + other].plain;
      }
      its = lanes_sum(its);
      const float N = static_cast<float>(args.N);
      if (lane_id == 0)
        numbers[r] = {CENTERED ? args.mean[base + r] : 0.0f, args.rstd[base + r], its.product / N,
                      its.plain / N};
    }
    __syncthreads();  // for the numbers of all rows
    for (int last = count - 1; last >= 0; last -= ROWS_AT_ONCE) {
      const auto row_of = [&](const void* rows, int64_t stride, int r) {
        const ReadRow<T> row(r <= last ? rows : nullptr, base + last - r, args.M, args.N, stride, part);
        return Packs(row, part, first, 0);
      };
      const Packs xs[] = {row_of(args.x, args.stride_xm, 0), row_of(args.x, args.stride_xm, 1)};
      const Packs douts[] = {row_of(args.dout, args.stride_dm, 0), row_of(args.dout, args.stride_dm, 1)};
      const Packs added[] = {row_of(args.dadded, args.stride_am, 0), row_of(args.dadded, args.stride_am, 1)};
      static_assert(ROWS_AT_ONCE == 2);
#pragma unroll
      for (int r = 0; r < ROWS_AT_ONCE; ++r) {
        if (r > last) break;
        const Pack<T> dx = columns.add(xs[r][0], douts[r][0], added[r][0], numbers[last - r]);
        T* const place = static_cast<T*>(args.dx) + (base + last - r) * args.N + part.start;
        if constexpr (SKEWS == Skews::ALIKE) store_part<Reuse::NONE>(place, part, first, dx);
        if constexpr (SKEWS == Skews::DIFFER) store_shifted<32>(place, part, first, dx);
      }
    }
  }

  if (slices.count > 1) {
    if (workspace == nullptr) return;
    columns.write(partial_sums(workspace, 0, slices.count, args.N, slice), columns.dweight);
    if constexpr (CENTERED)
      columns.write(partial_sums(workspace, 1, slices.count, args.N, slice), columns.dbias);
  } else {
    if (args.dweight) columns.write(static_cast<T*>(args.dweight), columns.dweight);
    if constexpr (CENTERED)
      if (args.dbias) columns.write(static_cast<T*>(args.dbias), columns.dbias);
  }
#endif
}

// Launches sums_kernel(args, parts, each, sums), whose body is leave_gradient_sums, then write_kernel(args,
// slices, parts, sums, workspace), whose body is write_split, and for several slices add_kernel, which adds
// their column sums. False if that would be too many blocks.
template <typename T>
bool launch_split(const NormBackwardArgs& args, bool centered,
                  void (*sums_kernel)(NormBackwardArgs, unsigned, int, GradientSums*),
                  void (*write_kernel)(NormBackwardArgs, Slices, int, const GradientSums*, float*),
                  void (*add_kernel)(const float*, int, int64_t, T*, T*)) {
  const int64_t wanted = SPLIT_BLOCKS_PER_SM * multiprocessor_count();  // blocks of a launch
  const int64_t tiles = cdiv(most_packs<T>(args.N), SPLIT_TILE);        // of a row
  const int64_t of_part = cdiv(tiles, std::clamp<int64_t>(cdiv(wanted, args.M), 1, tiles));
  const int64_t parts = cdiv(tiles, of_part), each = of_part * SPLIT_TILE;
  const int64_t strips = cdiv(args.N, SPLIT_THREADS * Pack<T>::SIZE);
  const int64_t most_slices = cdiv(args.M, LEAST_ROWS);
  const int64_t rows = cdiv(args.M, std::clamp<int64_t>(wanted / strips, 1, most_slices));
  const Slices slices{static_cast<unsigned>(strips), static_cast<int>(cdiv(args.M, rows)), rows};
  if (args.M * parts > INT32_MAX || strips * slices.count > INT32_MAX || each > INT32_MAX / 32) return false;

  auto* const sums =
      static_cast<GradientSums*>(args.memory->workspace(args.M * parts * sizeof(GradientSums)));
  sums_kernel<<<static_cast<unsigned>(args.M * parts), SPLIT_THREADS, 0, args.stream>>>(
      args, static_cast<unsigned>(parts), static_cast<int>(each), sums);
  CUDA_CHECK(cudaGetLastError());
  const auto write = [&](float* workspace) {
    launch_early(static_cast<unsigned>(strips * slices.count), SPLIT_THREADS, args.stream, write_kernel, args,
                 slices, static_cast<int>(parts), static_cast<const GradientSums*>(sums), workspace);
  };
  if (slices.count > 1) {
    launch_with_early_sums<T>(args, slices.count, centered, write, add_kernel);
  } else {
    write(nullptr);
  }
  return true;
}
