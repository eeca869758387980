// Ragged rows of up to 4 KiB, of which a warp holds one at a time: a kernel of layer_norm's v12 and
// rms_norm's v07, for rows that are no whole packs and start alike in all matrices. Terms: docs/glossary.md.
#pragma once

#include <utility>

#include "lib/held.cuh"
#include "norm_statistics.cuh"

constexpr int RAGGED_THREADS = 128, RAGGED_WARPS = RAGGED_THREADS / 32;
constexpr int MOST_RAGGED_PACKS = 8;  // of a lane
constexpr int MOST_RAGGED_ROWS = 8;   // that a warp takes one after the other
// Bytes: whole packs, and less than one more. A shorter row has no second pack in some lanes.
constexpr int64_t SHORTEST_RAGGED_ROW = 33 * 16;
constexpr int64_t LONGEST_RAGGED_ROW = 32 * MOST_RAGGED_PACKS * 16 + 15;

// Blocks that an SM must have room for, which bounds a thread's registers. A row takes one an element,
// because it is kept in fp32: otherwise each pass would convert it again. While a residual is added, packs of
// both are there beside it, and little else.
template <typename T, int PACKS, Residual RESIDUAL>
constexpr int RAGGED_BLOCKS =
    65'536 / RAGGED_THREADS /
    (RESIDUAL == Residual::ADDED ? PACKS * (8 + Pack<T>::SIZE) + 24 : PACKS * Pack<T>::SIZE + 40);

// Where a warp's lanes have the elements of a ragged row: 32 packs side by side, PACKS times, counted from
// the first multiple of 16 bytes in the row. So all but a lane's last pack are whole in every row for which
// PACKS is the fewest. Elements before the first pack and behind the last whole one are single: a lane has
// one.
template <typename T, int PACKS>
struct RaggedRow {
  static constexpr int SIZE = Pack<T>::SIZE;
  int head, first, single;  // elements before the packs; columns of this lane's first pack and element, or -1
  bool holds_last;

  __device__ RaggedRow(const T* row, int N, int lane_id) {
    head = (SIZE - skew_of(row)) % SIZE;
    const int whole = (N - head) / SIZE, tail = (N - head) % SIZE;
    first = head + lane_id * SIZE;
    holds_last = 32 * (PACKS - 1) + lane_id < whole;
    single = lane_id < head ? lane_id : lane_id < head + tail ? N - tail + lane_id - head : -1;
  }

  __device__ bool has_single() const { return single >= 0; }
  __device__ T load_single(const T* row) const { return row[max(single, 0)]; }
  __device__ bool holds(int i) const { return i < PACKS - 1 || holds_last; }

  // The last load has a predicate instead of a branch, because the compiler waits for loads before a branch.
  __device__ void load(Pack<T> (&packs)[PACKS], T& raw, const T* row) const {
    const auto* const words = reinterpret_cast<const uint4*>(row + first);
#pragma unroll
    for (int i = 0; i < PACKS - 1; ++i) packs[i].words = words[32 * i];
    uint4& last = packs[PACKS - 1].words;
    last = make_uint4(0, 0, 0, 0);
    asm volatile(
        "{\n"
        ".reg .pred holds;\n"
        "setp.ne.b32 holds, %5, 0;\n"
        "@holds ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(last.x), "+r"(last.y), "+r"(last.z), "+r"(last.w)
        : "l"(words + 32 * (PACKS - 1)), "r"(static_cast<int>(holds_last)));
    raw = load_single(row);
  }

  __device__ void store(T* row, int i, Pack<T> pack) const {
    if (holds(i)) __stwb(reinterpret_cast<uint4*>(row + first) + 32 * i, pack.words);
  }
};

// Weights or biases in fp32, in the lanes' order: four neighbouring ones of a pack lie together, and those of
// neighbouring lanes side by side, which meet no bank twice.
template <typename T, int PACKS>
struct RaggedFactors {
  static constexpr int SIZE = Pack<T>::SIZE, QUADS = SIZE / 4, EACH = 32 * PACKS * SIZE / RAGGED_THREADS;
  float4 quads[QUADS][32 * PACKS];
  float singles[32];  // of the lanes' single elements

  // Loads what this thread lays out: EACH elements of packs, and the single one of its lane. Without weights
  // or biases it loads as much of the row instead, and no load has to wait for a branch. Places behind the
  // row get any element.
  static __device__ void load(T (&its)[EACH + 1], const T* factors, const RaggedRow<T, PACKS>& row,
                              const T* x, int N) {
    const T* const from = factors ? factors : x;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      its[i] = from[min(row.head + static_cast<int>(threadIdx.x) + RAGGED_THREADS * i, N - 1)];
    its[EACH] = row.load_single(from);
  }

  // Converts and lays out what all threads of the block have loaded, or `value` if that is nothing: by a
  // mask, because the compiler would move the loads into a branch, where they begin after those of others are
  // done.
  __device__ void lay_out(const T (&its)[EACH + 1], bool given, float value) {
    const int thread = threadIdx.x, j = thread % SIZE;
    const uint32_t mask = given ? ~0u : 0u, otherwise = given ? 0u : __float_as_uint(value);
    const auto choose = [&](T its_one) {
      return __uint_as_float((__float_as_uint(to_float(its_one)) & mask) | otherwise);
    };
    float* const place = &quads[j / 4][thread / SIZE].x + j % 4;
#pragma unroll
    for (int i = 0; i < EACH; ++i) place[RAGGED_THREADS / SIZE * 4 * i] = choose(its[i]);
    if (thread < 32) singles[thread] = choose(its[EACH]);
  }

  // Those of this lane's i-th pack.
  __device__ void get(float (&its)[SIZE], int i, int lane_id) const {
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const float4 quad = quads[q][32 * i + lane_id];
      its[4 * q] = quad.x, its[4 * q + 1] = quad.y, its[4 * q + 2] = quad.z, its[4 * q + 3] = quad.w;
    }
  }
};

// A block takes rows of one skew, which lie `period` rows apart, a power of two: `each` rows a warp, one
// after the other. So weights and biases are laid out once for all of them.
template <typename T, int PACKS, Norm NORM, Residual RESIDUAL>
__device__ void normalise_ragged(const NormArgs& args, int each, int period) {
  constexpr bool CENTERED = NORM == Norm::LAYER, ADDED = RESIDUAL == Residual::ADDED;
  constexpr int SIZE = Pack<T>::SIZE;
  using Laid = RaggedFactors<T, PACKS>;
  __shared__ Laid memory[CENTERED ? 2 : 1];
  Laid &weights = memory[0], &biases = memory[CENTERED ? 1 : 0];

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int kind = static_cast<int>(blockIdx.x) & (period - 1);
  const int most = RAGGED_WARPS * each;
  const int64_t top = static_cast<int64_t>(blockIdx.x - kind) * most + kind;
  if (top >= args.M) return;  // no row of this skew is left
  const int span = static_cast<int>(min(static_cast<int64_t>(most * period), args.M - top));
  const int count = (span + period - 1) >> (__ffs(period) - 1);
  const T* const x = static_cast<const T*>(args.x) + top * args.stride_xm;
  const T* const residual = static_cast<const T*>(args.residual) + top * args.stride_rm;
  T* const out = static_cast<T*>(args.out) + top * N;
  T* const added = static_cast<T*>(args.added) + top * N;
  const RaggedRow<T, PACKS> row(x, N, lane_id);

  Pack<T> packs[PACKS], more[PACKS];
  T raw, more_raw;
  // Warps past the last row take the block's first one again, so that no warp diverges.
  const auto load = [&](int number) {
    const int64_t apart = number < count ? number * period : 0;
    row.load(packs, raw, x + apart * args.stride_xm);
    if (ADDED) row.load(more, more_raw, residual + apart * args.stride_rm);
    return apart;
  };
  int64_t apart = load(warp_id);
  const T *const weight = static_cast<const T*>(args.weight), *const bias = static_cast<const T*>(args.bias);
  T its_weights[Laid::EACH + 1], its_biases[Laid::EACH + 1];
  Laid::load(its_weights, weight, row, x, N);
  if (CENTERED) Laid::load(its_biases, bias, row, x, N);
  weights.lay_out(its_weights, weight, 1.0f);
  if (CENTERED) biases.lay_out(its_biases, bias, 0.0f);
  const float elements = static_cast<float>(N), inverse = 1.0f / elements;
  __syncthreads();  // waits for all threads' weights and biases

  for (int first = 0;;) {
    float values[PACKS][SIZE];
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
      for (int j = 0; j < SIZE; ++j) values[i][j] = float_of(packs[i], j);
    }
    if constexpr (ADDED) {
      T* const sums = added + apart * N;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) values[i][j] += float_of(more[i], j);
        round_to(packs[i], values[i]);
        row.store(sums, i, packs[i]);
#pragma unroll
        for (int j = 0; j < SIZE; ++j) values[i][j] = float_of(packs[i], j);
      }
      raw = from_float<T>(to_float(raw) + to_float(more_raw));
      if (row.has_single()) sums[row.single] = raw;
    }
    float single = row.has_single() ? to_float(raw) : 0.0f;

    float mean = 0.0f;
    if (CENTERED) {
      float sum = single;
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        float pack_sum = values[i][0];  // a chain of its own for each pack, so that additions overlap
#pragma unroll
        for (int j = 1; j < SIZE; ++j) pack_sum += values[i][j];
        sum += pack_sum;
      }
      sum = lanes_sum(sum);
      mean = sum * inverse;
      // Rounded as a division would be, which takes more instructions.
      mean = fmaf(fmaf(-elements, mean, sum), inverse, mean);
      if (row.has_single()) single -= mean;
    }
    float squares = single * single;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const float from = row.holds(i) ? mean : 0.0f;  // packs that are not held are 0, and add 0
      float pack_squares = 0.0f;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        if (CENTERED) values[i][j] -= from;
        pack_squares = fmaf(values[i][j], values[i][j], pack_squares);
      }
      squares += pack_squares;
    }
    const float rstd = rsqrtf(fmaf(lanes_sum(squares), inverse, args.eps));
    if (lane_id == 0) {
      if (CENTERED) args.mean[top + apart] = mean;
      args.rstd[top + apart] = rstd;
    }

    T* const results = out + apart * N;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float scales[SIZE], offsets[SIZE];
      weights.get(scales, i, lane_id);
      if (CENTERED) biases.get(offsets, i, lane_id);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float unit = values[i][j] * rstd;
        values[i][j] = CENTERED ? fmaf(unit, scales[j], offsets[j]) : unit * scales[j];
      }
      Pack<T> pack;
      round_to(pack, values[i]);
      row.store(results, i, pack);
    }
    if (row.has_single()) {
      const float unit = single * rstd, scale = weights.singles[lane_id];
      results[row.single] =
          from_float<T>(CENTERED ? fmaf(unit, scale, biases.singles[lane_id]) : unit * scale);
    }
    first += RAGGED_WARPS;
    if (first >= count) break;
    apart = load(first + warp_id);
  }
}

// Launches kernel_of(PACKS), an integral constant: the fewest packs that hold a row. False if a row is too
// short or too long, or if the grid would have too many blocks.
template <typename T, Residual RESIDUAL, typename KernelOf>
bool launch_ragged(const NormArgs& args, KernelOf kernel_of) {
  const int64_t packs = args.N / Pack<T>::SIZE;
  if (packs <= 32) return false;  // the first of two packs a lane would not be whole in all of them
  const auto launch = [&](auto its_packs) {
    constexpr int WARPS = RAGGED_BLOCKS<T, its_packs, RESIDUAL> * RAGGED_WARPS;
    const int64_t waves = args.M / (int64_t{multiprocessor_count()} * WARPS);
    // At least four waves of blocks, since the last one may be nearly empty.
    const int64_t each = std::clamp<int64_t>(waves / 4, 1, MOST_RAGGED_ROWS);
    const int period = skew_period<T>(args.N);
    const int64_t blocks = cdiv(args.M, period * RAGGED_WARPS * each) * period;
    if (blocks > INT32_MAX) return false;
    kernel_of(its_packs)<<<static_cast<unsigned>(blocks), RAGGED_THREADS, 0, args.stream>>>(
        args, static_cast<int>(each), period);
    CUDA_CHECK(cudaGetLastError());
    return true;
  };
  const auto choose = [&]<int... LESS>(std::integer_sequence<int, LESS...>) {
    return ((packs <= 32 * (LESS + 2) && launch(std::integral_constant<int, LESS + 2>{})) || ...);
  };
  return choose(std::make_integer_sequence<int, MOST_RAGGED_PACKS - 1>{});
}
