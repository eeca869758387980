// Register-resident split rows: the kernel of layer_norm's v08, v10 and v11 and rms_norm's v05. A cluster
// holds one row or two in registers, and weights and biases in shared memory. Terms: docs/glossary.md.
#pragma once

#include "lib/held.cuh"
#include "lib/ptx/ampere.cuh"
#include "norm_cluster.cuh"

// Weights or biases in shared memory, laid out as in global memory: piece number `index`, for the part of a
// row that a warp holds, or for a whole short row. Unless rows are LINED, the piece begins a line earlier,
// since the part of a misaligned row begins up to a line before its nominal column; and it has one pack more,
// since a pack with the row's skew is shifted together from two.
template <typename T, int PACKS, bool LINED>
struct HeldFactors {
  static constexpr int SIZE = Pack<T>::SIZE, LINE = LINED ? 0 : LINE_ELEMENTS<T>;
  static constexpr int COUNT = 32 * PACKS + (LINED ? 0 : LINE / SIZE + 1);
  uint4* packs;
  const T* factors;  // or null
  int skew;

  __device__ HeldFactors(char* memory, int index, const T* factors)
      : packs(reinterpret_cast<uint4*>(memory) + index * COUNT),
        factors(factors),
        skew(LINED || !factors ? 0 : skew_of(factors)) {}

  // The column of the piece's first element; negative where it lies before the row's first.
  __device__ int start(const HeldPart<T, PACKS>& part) const {
    return part.own * part.ELEMENTS - LINE - skew;
  }

  // Issues this thread's asynchronous copies; THREADS threads share a piece. Without weights or biases it
  // stores `value` in their place.
  template <int THREADS>
  __device__ void load(const HeldPart<T, PACKS>& part, int thread, float value) {
    Pack<T> same;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) set(same, i, from_float<T>(value));
    const int first = start(part) + thread * SIZE;
    const T* const place = factors + first;
#pragma unroll
    for (int i = 0; i < (COUNT + THREADS - 1) / THREADS; ++i) {
      uint4* const pack = &packs[THREADS * i + thread];
      if (THREADS * (i + 1) > COUNT && THREADS * i + thread >= COUNT) break;
      // 16 bytes that hold one of the elements can all be read.
      const bool touches = static_cast<unsigned>(first + THREADS * i * SIZE + SIZE - 1) <
                           static_cast<unsigned>(part.N + SIZE - 1);
      // Through L1, which serves the SM's next rows: from L2 all SMs would read the same few lines, which lie
      // in few of its slices.
      if (factors) cp_async<16, true>(pack, place + THREADS * i * SIZE, touches);
      if (!factors) *pack = same.words;
    }
  }

  // The weights or biases for this lane's i-th pack of a row. All threads' copies must have arrived. Elements
  // outside of the row are undefined.
  __device__ Pack<T> operator()(const HeldPart<T, PACKS>& part, int i) const {
    const int pack = 32 * i + part.lane_id;
    if (LINED) return {packs[pack]};
    const int offset = LINE + skew - part.skew + pack * SIZE;
    return put_together<T>(packs[offset / SIZE], packs[offset / SIZE + 1], offset % SIZE);
  }

  // The weight or bias of one column of the part. All threads' copies must have arrived.
  __device__ float at(const HeldPart<T, PACKS>& part, int column) const {
    return to_float(reinterpret_cast<const T*>(packs)[column - start(part)]);
  }
};

// A warp's weights or biases, realigned in place ahead of their use: each pack is rewritten with the row's
// skew, so that write() neither shifts nor loads twice. In place is safe, because a new pack is made of two
// old packs at its own index or higher ones. So the old pack that it replaces serves only new packs of the
// same 32, which all lanes have read before the store, and earlier ones, which are done.
template <typename T, int PACKS>
class LaidFactors {
 public:
  // All lanes call it, after all lanes' copies have arrived.
  __device__ LaidFactors(const HeldFactors<T, PACKS, false>& factors, const HeldPart<T, PACKS>& part,
                         int single)
      : packs_(factors.packs), at_single_(single != part.NONE ? factors.at(part, single) : 0.0f) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const Pack<T> laid = factors(part, i);
      __syncwarp();  // for all lanes to have read what these 32 packs replace
      packs_[32 * i + part.lane_id] = laid.words;
    }
  }

  __device__ Pack<T> operator()(const HeldPart<T, PACKS>& part, int i) const {
    return {packs_[32 * i + part.lane_id]};
  }
  // The value for this lane's single element, whose column was given to the constructor.
  __device__ float at(const HeldPart<T, PACKS>&, int) const { return at_single_; }

 private:
  uint4* packs_;
  float at_single_;
};

// The statistics of a warp's part of a row. `element` is the lane's single element, or 0 if it has none.
template <bool CENTERED, typename T, int PACKS>
__device__ MeanSquares moments_of(Pack<T> (&held)[PACKS], const HeldPart<T, PACKS>& part, bool has_single,
                                  float element) {
  constexpr int SIZE = Pack<T>::SIZE;
  MeanSquares mine = {};
  if (CENTERED) {
    float sum = element;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float pack_sum = 0.0f;  // a chain of its own for each pack, so that additions overlap
      keep_packed(held[i]);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) pack_sum += float_of(held[i], j);
      sum += pack_sum;
    }
    mine.mean = lanes_sum(sum) / static_cast<float>(max(part.elements_of(part.own), 1));
  }
  if (has_single) mine.squares = (element - mine.mean) * (element - mine.mean);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const float from = part.holds(i) ? mine.mean : 0.0f;  // packs outside of the row are 0, and add 0
    float squares = 0.0f;
    keep_packed(held[i]);
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      const float distance = CENTERED ? float_of(held[i], j) - from : float_of(held[i], j);
      squares = fmaf(distance, distance, squares);
    }
    mine.squares += squares;
  }
  mine.squares = lanes_sum(mine.squares);
  return mine;
}

// Merges the statistics of all parts of a row by Chan's formula, EACH parts a lane. `of` returns a part's.
template <bool CENTERED, typename T, int PACKS, typename Of>
__device__ MeanSquares merged_parts(const HeldPart<T, PACKS>& part, int parts, Of of) {
  constexpr int EACH = MOST_PARTS / 32;
  MeanSquares its[EACH], whole = {};
  float elements[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int other = 32 * i + part.lane_id;
    its[i] = other < parts ? of(other) : MeanSquares{};
    elements[i] = static_cast<float>(part.elements_of(other));  // 0 for parts beyond the row
    if (CENTERED) whole.mean = fmaf(elements[i], its[i].mean, whole.mean);
  }
  if (CENTERED) whole.mean = lanes_sum(whole.mean) / static_cast<float>(part.N);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const float distance = its[i].mean - whole.mean;
    whole.squares += its[i].squares;
    if (CENTERED) whole.squares = fmaf(elements[i] * distance, distance, whole.squares);
  }
  whole.squares = lanes_sum(whole.squares);
  return whole;
}

// Loads x or the residual. Where skews DIFFER, the part's reach must cover this input's.
template <Skews SKEWS, typename T, int PACKS>
__device__ void load_input(Pack<T> (&packs)[PACKS], const T* row, const HeldPart<T, PACKS>& part) {
  if constexpr (SKEWS == Skews::ALIKE) {
    load_held(packs, row, part, 0.0f);
  } else {
    const T* const first = row + part.first_of(0);
    load_shifted<32 * Pack<T>::SIZE>(packs, first, skew_of(first), 0.0f,
                                     [&](int i) { return part.holds(i); });
  }
}

// Adds the residual to a register-resident row, rounds the sum to T, and stores it to `added`.
template <Skews SKEWS, typename T, int PACKS>
__device__ void add_residual(Pack<T> (&held)[PACKS], T& raw, const T* residual, T* added,
                             const HeldPart<T, PACKS>& part, int single) {
  constexpr int SIZE = Pack<T>::SIZE;
  Pack<T> more[PACKS];
  load_input<SKEWS>(more, residual, part);
  if (single != part.NONE) {
    raw = from_float<T>(to_float(raw) + to_float(residual[single]));
    added[single] = raw;
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    float values[SIZE];
#pragma unroll
    for (int j = 0; j < SIZE; ++j) values[j] = float_of(held[i], j) + float_of(more[i], j);
    round_to(held[i], values);
    if (part.holds(i)) __stwb(reinterpret_cast<uint4*>(added + part.first_of(i)), held[i].words);
  }
}

// ROWS register-resident rows: of each, this thread's PACKS packs and its single element, if it has one. Rows
// lie `period` rows apart, a power of two, so that all have the same skew.
template <typename T, int ROWS, int PACKS>
struct HeldRows {
  Pack<T> packs[ROWS][PACKS];
  T raw[ROWS];
  float means[ROWS], rstds[ROWS];
  int64_t first_index, M;
  int period;

  // Group number `which` of the matrix's rows.
  __device__ HeldRows(const NormArgs& args, int64_t which, int period) : M(args.M), period(period) {
    const int64_t kind = ROWS > 1 ? which & (period - 1) : 0;
    first_index = (which - kind) * ROWS + kind;
  }

  // Whether row r exists, given that the first one does.
  __device__ bool is_row(int r) const { return r == 0 || first_index + r * period < M; }

  // Issues the loads. `first` points to the first row, which is loaded in place of rows beyond the matrix.
  template <Skews SKEWS = Skews::ALIKE>
  __device__ void load(const T* first, int64_t stride, const HeldPart<T, PACKS>& part, int single) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const T* const row = first + (is_row(r) ? r * period : 0) * stride;
      load_input<SKEWS>(packs[r], row, part);
      raw[r] = single != part.NONE ? row[single] : from_float<T>(0.0f);
    }
  }

  // Stores mean and rstd of row r. One lane calls it.
  template <bool CENTERED>
  __device__ void write_numbers(const NormArgs& args, int r) const {
    if (!is_row(r)) return;
    if (CENTERED) args.mean[first_index + r * period] = means[r];
    args.rstd[first_index + r * period] = rstds[r];
  }

  // Writes the outputs, after the copies of weights and biases have arrived. Without CENTERED means and
  // biases are unused.
  template <bool CENTERED, typename Factors>
  __device__ void write(T* out, const HeldPart<T, PACKS>& part, int single, const Factors& weights,
                        const Factors& biases) {
    constexpr int SIZE = Pack<T>::SIZE;
    out += first_index * part.N;
    const auto result = [&](int r, float value, float its_weight, float its_bias) {
      const float unit = (CENTERED ? value - means[r] : value) * rstds[r];
      return CENTERED ? fmaf(unit, its_weight, its_bias) : unit * its_weight;
    };
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const Pack<T> its_weights = weights(part, i);
      const Pack<T> its_biases = CENTERED ? biases(part, i) : Pack<T>{};
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        keep_packed(packs[r][i]);
        float values[SIZE];
#pragma unroll
        for (int j = 0; j < SIZE; ++j)
          values[j] = result(r, float_of(packs[r][i], j), float_of(its_weights, j), float_of(its_biases, j));
        Pack<T> results;
        round_to(results, values);
        // One 16-byte store: the compiler would split a plain assignment.
        T* const place = out + static_cast<int64_t>(r) * period * part.N + part.first_of(i);
        if (part.holds(i) && is_row(r)) __stwb(reinterpret_cast<uint4*>(place), results.words);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (single == part.NONE || !is_row(r)) continue;
      const float its_bias = CENTERED ? biases.at(part, single) : 0.0f;
      out[static_cast<int64_t>(r) * period * part.N + single] =
          from_float<T>(result(r, to_float(raw[r]), weights.at(part, single), its_bias));
    }
  }
};

// A cluster of `blocks` blocks takes ROWS rows at once, of which a thread holds PACKS packs each. Every warp
// sends the statistics of its parts to all blocks, and waits for those of the others; weights and biases
// travel to shared memory meanwhile.
// - CENTERED: layer_norm; without it (rms_norm) the mean is 0.
// - LINED: rows of x start on lines and are whole packs; out, weights and biases start at multiples of 16
//   bytes.
// - RESIDUAL: there is one. It takes the registers of a second row, so ROWS is 1.
// - LAID: where rows are not LINED, weights and biases are realigned while the rows travel, see LaidFactors.
// - SKEWS: where they DIFFER, packs are laid out on the lines of out, see HeldPart.
template <typename T, int ROWS, int PACKS, bool CENTERED, bool LINED, bool RESIDUAL, bool LAID = false,
          Skews SKEWS = Skews::ALIKE>
__device__ void normalise_held(const NormArgs& args, int blocks, int period) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  __shared__ WarpExchange<MeanSquares, ROWS> exchange;

  const int N = static_cast<int>(args.N), lane_id = threadIdx.x % 32, warp_id = threadIdx.x / 32;
  const int warps = blockDim.x / 32, parts = blocks * warps, own = blockIdx.y * warps + warp_id;
  HeldRows<T, ROWS, PACKS> rows(args, blockIdx.x, period);
  if (rows.first_index >= args.M) return;  // the same for all blocks of a cluster
  const T* const x = static_cast<const T*>(args.x) + rows.first_index * args.stride_xm;
  const T* const residual = static_cast<const T*>(args.residual) + rows.first_index * args.stride_rm;
  const T* const lined = SKEWS == Skews::ALIKE ? x : static_cast<T*>(args.out) + rows.first_index * N;
  HeldPart<T, PACKS> part{N, LINED ? 0 : skew_of<LINE_BYTES>(lined), own, lane_id};
  if (SKEWS == Skews::DIFFER) {
    part.reach = reach_of<T>(skew_of(x + part.first_of(0)));
    if (RESIDUAL) part.reach = max(part.reach, reach_of<T>(skew_of(residual + part.first_of(0))));
  }
  HeldFactors<T, PACKS, LINED> weights(memory, warp_id, static_cast<const T*>(args.weight));
  HeldFactors<T, PACKS, LINED> biases(memory, warps + warp_id,
                                      CENTERED ? static_cast<const T*>(args.bias) : nullptr);

  weights.template load<32>(part, lane_id, 1.0f);
  if (CENTERED) biases.template load<32>(part, lane_id, 0.0f);
  cp_async_commit_group();
  const int single = LINED ? part.NONE : part.single();
  rows.template load<SKEWS>(x, args.stride_xm, part, single);
  exchange.begin(parts);
  if constexpr (RESIDUAL) {
    static_assert(ROWS == 1);
    add_residual<SKEWS>(rows.packs[0], rows.raw[0], residual,
                        static_cast<T*>(args.added) + rows.first_index * N, part, single);
  }

  const auto find_numbers = [&] {
    MeanSquares mine[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      mine[r] = moments_of<CENTERED>(rows.packs[r], part, single != part.NONE, to_float(rows.raw[r]));
    if (!LAID) exchange.meet();
    exchange.swap(mine, own, blocks);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const MeanSquares whole =
          merged_parts<CENTERED>(part, parts, [&](int other) { return exchange.at(other, r); });
      rows.means[r] = whole.mean;
      rows.rstds[r] = rstd_of(whole.squares, N, args.eps);
      if (own == 0 && lane_id == 0) rows.template write_numbers<CENTERED>(args, r);
    }
  };
  const auto wait_for_factors = [] {
    cp_async_wait_group<0>();  // for this lane's copies
    __syncwarp();              // for other lanes' copies
  };
  T* const out = static_cast<T*>(args.out);
  if constexpr (LAID) {
    static_assert(CENTERED && !LINED);  // there are biases, and something to realign
    wait_for_factors();                 // L1 or L2 brings them before memory brings the rows
    const LaidFactors<T, PACKS> laid_weights(weights, part, single), laid_biases(biases, part, single);
    // The cluster's barrier stands here to keep the compiler's schedule: no sum, which waits for the rows,
    // moves above it, and the realignment is complete below it.
    exchange.meet();
    find_numbers();
    rows.template write<CENTERED>(out, part, single, laid_weights, laid_biases);
  } else {
    find_numbers();
    wait_for_factors();
    rows.template write<CENTERED>(out, part, single, weights, biases);
  }
#endif
}

// Whether the LINED kernels apply. Residual and `added` need no test: launch_held requires that they have x's
// skew.
template <typename T>
bool are_lined(const NormArgs& args) {
  const auto starts = [](const void* rows) { return reinterpret_cast<uintptr_t>(rows) % LINE_BYTES == 0; };
  return args.N % Pack<T>::SIZE == 0 && args.stride_xm % LINE_ELEMENTS<T> == 0 && starts(args.x) &&
         aligned_to_16_bytes(args.weight, args.bias, args.out);
}

// Whether all matrices have x's skew in every row.
template <typename T>
bool are_alike(const NormArgs& args) {
  const auto like_x = [&](const void* rows, int64_t stride) {
    return skewed_alike<T>(args.x, args.stride_xm, rows, stride);
  };
  return like_x(args.out, args.N) &&
         (!args.residual || (like_x(args.residual, args.stride_rm) && like_x(args.added, args.N)));
}

// Whether what is laid out or stored with packs of out allows it.
template <typename T>
bool fits_out(const NormArgs& args) {
  return (!args.added || skewed_alike<T>(args.added, args.N, args.out, args.N)) &&
         aligned_to_16_bytes(args.weight, args.bias);
}

// Launches kernel(args, blocks, period), whose body is normalise_held, in blocks of at most WARPS warps.
// False if the GPU has no room for the cluster, if a row is too long or too short for one, or if skews DIFFER
// more than the kernel allows: ALIKE, all matrices have x's skew; else `added` has out's, and weights and
// biases start at multiples of 16 bytes.
template <typename T, int ROWS, int PACKS, bool CENTERED, bool LINED, int WARPS = HELD_WARPS,
          Skews SKEWS = Skews::ALIKE, typename Kernel>
bool launch_held(const NormArgs& args, Kernel* kernel) {
  constexpr int WARP_BYTES = HeldFactors<T, PACKS, LINED>::COUNT * 16 * (CENTERED ? 2 : 1);
  constexpr bool ALIKE = SKEWS == Skews::ALIKE;
  if (args.N < (ALIKE ? 2 : 3) * Pack<T>::SIZE) return false;
  if (ALIKE ? !are_alike<T>(args) : !fits_out<T>(args)) return false;
  if constexpr (WARPS * WARP_BYTES + sizeof(WarpExchange<MeanSquares, ROWS>) > 48 * 1024)
    allow_shared_memory(kernel, WARPS * WARP_BYTES);
  const int64_t packs = ALIKE ? most_packs<T, LINE_BYTES>(args.x, args.N, args.stride_xm)
                              : most_packs<T, LINE_BYTES>(args.out, args.N, args.N);
  const HeldShape shape(packs, PACKS, WARPS);
  static_assert(ALIKE || ROWS == 1);
  const int period = ROWS > 1 ? skew_period<T, LINE_BYTES>(args.stride_xm) : 1;
  return launch_by_rows(cdiv(args.M, int64_t{ROWS} * period) * period, shape, shape.threads / 32 * WARP_BYTES,
                        args.stream, kernel, args, shape.blocks, period);
}
