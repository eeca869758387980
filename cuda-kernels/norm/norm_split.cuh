// Rows that are split over blocks by two launches: the kernels of layer_norm's v12 and rms_norm's v07 for
// rows that no cluster holds. The first launch leaves the statistics of each part of a row, the second merges
// them and writes. Terms: docs/glossary.md.
#pragma once

#include "lib/early.cuh"
#include "lib/ptx/hopper.cuh"
#include "norm.cuh"
#include "norm_shifted.cuh"

constexpr int SPLIT_THREADS = 256;
constexpr int SPLIT_TILE = SPLIT_THREADS * 4;  // packs; a part is a multiple
// Packs of a matrix that a thread has at once, in the first launch and in the second. Blocks that an SM runs
// at once: packs that are shifted together take twice the registers.
template <Residual RESIDUAL>
constexpr int SUM_PACKS = RESIDUAL == Residual::NONE ? 4 : 2;
constexpr int WRITE_PACKS = 2;
template <Skews SKEWS>
constexpr int SPLIT_BLOCKS = SKEWS == Skews::ALIKE ? 4 : 3;
constexpr int MOST_TILES = 4;           // of a part, unless the row would have too many parts
constexpr int MOST_SPLIT_PARTS = 512;   // of a row, so that a warp merges them in little time
constexpr int MOST_GROUP_ROWS = 16;     // that a block of the second launch writes
constexpr int SPLIT_BLOCKS_PER_SM = 8;  // if there is work for so many

// Count, mean, and the sum of squared distances from this mean. Without CENTERED (rms_norm) the mean is 0,
// and the count of no use.
struct Moments {
  float count = 0.0f, mean = 0.0f, squares = 0.0f;
};

// Chan's formula.
template <bool CENTERED>
__device__ Moments merge(Moments a, Moments b) {
  if (!CENTERED) return {0.0f, 0.0f, a.squares + b.squares};
  if (b.count == 0.0f) return a;
  if (a.count == 0.0f) return b;  // or a distance that overflows would count 0 times infinity
  const float count = a.count + b.count, distance = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + distance * share, a.squares + b.squares + distance * distance * a.count * share};
}

// The part of a row that a block has. Blocks that follow one another have the same part of all rows, so that
// its weights and biases are still in L2 when the next row's block asks for them.
struct BlockPlace {
  int64_t row;
  unsigned part;
  __device__ BlockPlace(int64_t M, unsigned block)
      : row(block % static_cast<unsigned>(M)), part(block / static_cast<unsigned>(M)) {}
};

// The moments of a thread's packs, which are 0 outside of the part: the mean first, then the squares.
template <bool CENTERED, typename T, int PACKS>
__device__ Moments moments_of(Pack<T> (&packs)[PACKS], const RowPart<T>& part, int first, int step) {
  constexpr int SIZE = Pack<T>::SIZE;
  Moments mine;
  if (CENTERED) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float sum = 0.0f;  // a chain of its own for each pack, so that additions overlap
      keep_packed(packs[i]);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) sum += float_of(packs[i], j);
      mine.mean += sum;
      count += part.count(first + i * step);
    }
    mine.count = static_cast<float>(count);
    mine.mean = count > 0 ? mine.mean / mine.count : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    float squares = 0.0f;
    keep_packed(packs[i]);
    if (!CENTERED || part.count(first + i * step) == SIZE) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float distance = float_of(packs[i], j) - mine.mean;
        squares = fmaf(distance, distance, squares);
      }
    } else {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float distance = float_of(packs[i], j) - mine.mean;
        if (part.has(first + i * step + j)) squares = fmaf(distance, distance, squares);
      }
    }
    mine.squares += squares;
  }
  return mine;
}

// First launch: a block leaves the moments of its part of a row in `moments` [M, parts]. With a residual it
// also stores the sum to `added`, on whose multiples of 16 bytes packs are laid out; else on those of x.
template <typename T, bool CENTERED, Skews SKEWS, Residual RESIDUAL>
__device__ void leave_moments(const NormArgs& args, unsigned parts, int each, Moments* moments) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, STEP = SPLIT_THREADS * SIZE, PACKS = SUM_PACKS<RESIDUAL>;
  __shared__ Moments of_warps[SPLIT_THREADS / 32];
  allow_dependent_launch();
  const BlockPlace place(args.M, blockIdx.x);
  const int64_t index = place.row;
  const NormRow<T> row(args, index);
  const RowPart<T> part(args.N, skew_of(RESIDUAL == Residual::ADDED ? row.added : row.x), place.part, each);
  Moments mine;
  for (int first = threadIdx.x * SIZE; first < part.end; first += PACKS * STEP) {
    using Packs = ShiftedPacks<T, SKEWS, PACKS>;
    Pack<T> packs[PACKS];
    const Packs x({args.x, index, args.M, args.N, args.stride_xm, part}, part, first, STEP);
    if constexpr (RESIDUAL == Residual::ADDED) {
      const Packs residual({args.residual, index, args.M, args.N, args.stride_rm, part}, part, first, STEP);
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        packs[i] = x[i] + residual[i];
        store_part<Reuse::SOON>(row.added + part.start, part, first + i * STEP, packs[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) packs[i] = x[i];
    }
    mine = merge<CENTERED>(mine, moments_of<CENTERED>(packs, part, first, STEP));
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine = merge<CENTERED>(mine, {__shfl_down_sync(0xffffffff, mine.count, distance),
                                  __shfl_down_sync(0xffffffff, mine.mean, distance),
                                  __shfl_down_sync(0xffffffff, mine.squares, distance)});
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = mine;
  __syncthreads();  // for every warp's moments
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < SPLIT_THREADS / 32; ++warp) mine = merge<CENTERED>(mine, of_warps[warp]);
  moments[index * parts + place.part] = mine;
#endif
}

// The moments of a whole row from those of its parts, in a fixed order. A whole warp calls it, and all lanes
// get them. Means enter as distances from the first part's, or those far from zero would lose digits.
template <bool CENTERED>
__device__ Moments merged_row(const Moments* of_parts, int parts, int64_t N) {
  const int lane = threadIdx.x % 32;
  Moments whole;
  whole.count = static_cast<float>(N);
  if (CENTERED) {
    const float first = of_parts[0].mean;
    float distances = 0.0f;
#pragma unroll 4
    for (int part = lane; part < parts; part += 32)
      distances += of_parts[part].count * (of_parts[part].mean - first);
    whole.mean = first + lanes_sum(distances) / whole.count;
  }
#pragma unroll 4
  for (int part = lane; part < parts; part += 32) {
    const Moments its = of_parts[part];
    const float distance = its.mean - whole.mean;
    whole.squares += its.squares;
    if (CENTERED) whole.squares += its.count * distance * distance;
  }
  whole.squares = lanes_sum(whole.squares);
  return whole;
}

// Second launch: a block merges the moments of `rows` rows, and writes the same columns of all of them, so
// that their weights and biases are in L1 from the second row on. `groups` blocks share the rows. The last
// columns come first, because what the first launch read last is still in L2.
template <typename T, bool CENTERED, Skews SKEWS>
__device__ void write_split(const NormArgs& args, unsigned parts, unsigned groups, const Moments* moments) {
#if __CUDA_ARCH__ >= 900
  constexpr int SIZE = Pack<T>::SIZE, STEP = SPLIT_THREADS * SIZE;
  __shared__ float means[MOST_GROUP_ROWS], rstds[MOST_GROUP_ROWS];
  const unsigned block = gridDim.x - 1 - blockIdx.x, chunk = block / groups;
  const int64_t first_row = args.M * (block % groups) / groups;
  const int rows = static_cast<int>(args.M * (block % groups + 1) / groups - first_row);
  wait_for_previous_kernel();  // for the moments, and the sums x + residual
  for (int r = threadIdx.x / 32; r < rows; r += SPLIT_THREADS / 32) {
    const Moments whole =
        merged_row<CENTERED>(moments + (first_row + r) * parts, static_cast<int>(parts), args.N);
    if (threadIdx.x % 32 > 0) continue;
    means[r] = whole.mean;
    rstds[r] = rstd_of(whole.squares, args.N, args.eps);
    if (chunk > 0) continue;
    if (CENTERED) args.mean[first_row + r] = means[r];
    args.rstd[first_row + r] = rstds[r];
  }
  __syncthreads();  // for all rows' means and rstds
  for (int r = 0; r < rows; ++r) {
    const int64_t index = first_row + r, stride = args.added ? args.N : args.stride_xm;
    const NormRow<T> row(args, index);
    const RowPart<T> part(args.N, skew_of(row.out), chunk, WRITE_PACKS * SPLIT_THREADS);
    const int first = threadIdx.x * SIZE;
    using Packs = ShiftedPacks<T, SKEWS, WRITE_PACKS>;
    const Packs inputs({args.added ? args.added : args.x, index, args.M, args.N, stride, part}, part, first,
                       STEP);
    const Packs weights({args.weight, args.N, part}, part, first, STEP);
    const Packs biases({CENTERED ? args.bias : nullptr, args.N, part}, part, first, STEP);
#pragma unroll
    for (int i = 0; i < WRITE_PACKS; ++i) {
      const Pack<T> results = normalised<CENTERED>(
          row, inputs[i], means[r], rstds[r], [&] { return weights[i]; }, [&] { return biases[i]; });
      store_part<Reuse::NONE>(row.out + part.start, part, first + i * STEP, results);
    }
  }
#endif
}

// Launches moments_kernel(args, parts, each, moments), whose body is leave_moments, and write_kernel(args,
// parts, groups, moments), whose body is write_split. False if that would be too many blocks.
template <typename T>
bool launch_split(const NormArgs& args, void (*moments_kernel)(NormArgs, unsigned, int, Moments*),
                  void (*write_kernel)(NormArgs, unsigned, unsigned, const Moments*)) {
  const int64_t packs = most_packs<T>(args.N), tiles = cdiv(packs, SPLIT_TILE);  // of a row
  const int64_t enough = SPLIT_BLOCKS_PER_SM * multiprocessor_count();           // blocks
  const int64_t wanted = std::clamp<int64_t>(args.M * tiles / enough, 1, MOST_TILES);
  const int64_t of_part = cdiv(tiles, std::min<int64_t>(cdiv(tiles, wanted), MOST_SPLIT_PARTS));
  const int64_t parts = cdiv(tiles, of_part), blocks = args.M * parts;
  const int64_t chunks = cdiv(packs, WRITE_PACKS * SPLIT_THREADS);
  const int64_t groups = std::max(std::min(cdiv(enough, chunks), args.M), cdiv(args.M, MOST_GROUP_ROWS));
  if (std::max(blocks, chunks * groups) > INT32_MAX) return false;
  auto* const moments = static_cast<Moments*>(args.memory->workspace(blocks * sizeof(Moments)));
  moments_kernel<<<static_cast<unsigned>(blocks), SPLIT_THREADS, 0, args.stream>>>(
      args, static_cast<unsigned>(parts), static_cast<int>(of_part * SPLIT_TILE), moments);
  CUDA_CHECK(cudaGetLastError());
  launch_early(static_cast<unsigned>(chunks * groups), SPLIT_THREADS, args.stream, write_kernel, args,
               static_cast<unsigned>(parts), static_cast<unsigned>(groups),
               static_cast<const Moments*>(moments));
  return true;
}
