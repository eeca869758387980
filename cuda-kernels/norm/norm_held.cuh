// Register-resident parts of rows: a warp's weights and biases in shared memory, its statistics, and its
// result. Used by layer_norm from v08 on and by rms_norm from v05 on. Terms: docs/glossary.md.
#pragma once

#include "lib/held.cuh"
#include "lib/ptx/ampere.cuh"
#include "norm_statistics.cuh"

// Weights or biases in shared memory, laid out as in global memory: piece number `index`, for the part of a
// row that a warp holds, or for a whole short row. Where rows may start at any ELEMENT, the piece begins a
// line earlier, since the part of a misaligned row begins up to a line before its nominal column; and it has
// one pack more, since a pack with the row's skew is shifted together from two.
template <typename T, int PACKS, Alignment ALIGNMENT>
struct HeldFactors {
  static constexpr bool ALIGNED = ALIGNMENT != Alignment::ELEMENT;
  static constexpr int SIZE = Pack<T>::SIZE, LINE = ALIGNED ? 0 : LINE_ELEMENTS<T>;
  static constexpr int COUNT = 32 * PACKS + (ALIGNED ? 0 : LINE / SIZE + 1);
  uint4* packs;
  const T* factors;  // or null
  int skew;
  T rest;  // of the last word, if it is not whole: this thread's element

  __device__ HeldFactors(char* memory, int index, const T* factors)
      : packs(reinterpret_cast<uint4*>(memory) + index * COUNT),
        factors(factors),
        skew(ALIGNED || !factors ? 0 : skew_of(factors)) {}

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
      const bool touches = static_cast<unsigned>(first + THREADS * i * SIZE + SIZE - 1) <
                           static_cast<unsigned>(part.N + SIZE - 1);
      const bool before = i == 0 && first <= -SIZE;  // only the first of a thread's copies may be
      const bool whole = ALIGNED ? touches : !before && first + THREADS * i * SIZE + SIZE <= part.N;
      // Through L1, which serves the SM's next rows: from L2 all SMs would read the same few lines, which lie
      // in few of its slices.
      if (factors && (ALIGNED || whole)) cp_async<16, true>(pack, place + THREADS * i * SIZE, whole);
      if (!factors) *pack = same.words;
    }
    if constexpr (!ALIGNED) {
      if (has_rest(part, thread)) rest = factors[last_word(part) + thread];
    }
  }

  // Of a last word that is not whole a thread has one element in a register, because a copy of 16 bytes would
  // end behind the tensor. Stores it, once the rows' loads are under way.
  __device__ void store_rest(const HeldPart<T, PACKS>& part, int thread) {
    if constexpr (!ALIGNED) {
      if (has_rest(part, thread)) reinterpret_cast<T*>(packs)[last_word(part) + thread - start(part)] = rest;
    }
  }

  // The weights or biases for this lane's i-th pack of a row. All threads' copies must have arrived. Elements
  // outside of the row are undefined.
  __device__ Pack<T> operator()(const HeldPart<T, PACKS>& part, int i) const {
    const int pack = 32 * i + part.lane_id;
    if (ALIGNED) return {packs[pack]};
    const int offset = LINE + skew - part.skew + pack * SIZE;
    return put_together<T>(packs[offset / SIZE], packs[offset / SIZE + 1], offset % SIZE);
  }

  // The weight or bias of one column of the part. All threads' copies must have arrived.
  __device__ float at(const HeldPart<T, PACKS>& part, int column) const {
    return to_float(reinterpret_cast<const T*>(packs)[column - start(part)]);
  }

 private:
  // The column at which the last word begins, if it is not whole; otherwise N.
  __device__ int last_word(const HeldPart<T, PACKS>& part) const { return part.N - (part.N + skew) % SIZE; }

  // Whether this thread has an element of it.
  __device__ bool has_rest(const HeldPart<T, PACKS>& part, int thread) const {
    return factors && last_word(part) + thread < part.N &&
           static_cast<unsigned>(last_word(part) - start(part)) < static_cast<unsigned>(COUNT * SIZE);
  }
};

// The statistics of a warp's part of a row. `element` is the lane's single element, or 0 if it has none.
template <Norm NORM, typename T, int PACKS>
__device__ MeanSquares statistics_of(Pack<T> (&held)[PACKS], const HeldPart<T, PACKS>& part, bool has_single,
                                     float element) {
  constexpr bool CENTERED = NORM == Norm::LAYER;
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
template <Norm NORM, typename T, int PACKS, typename Of>
__device__ MeanSquares merged_parts(const HeldPart<T, PACKS>& part, int parts, Of of) {
  constexpr bool CENTERED = NORM == Norm::LAYER;
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

// A warp's parts of ROWS register-resident rows: of each, this thread's PACKS packs and its single element,
// if it has one. Rows lie `period` rows apart, a power of two, so that all have the same skew.
template <typename T, int ROWS, int PACKS>
struct HeldParts {
  Pack<T> packs[ROWS][PACKS];
  T raw[ROWS];
  float means[ROWS], rstds[ROWS];
  int64_t first_index, M;
  int period;

  // Group number `which` of the matrix's rows.
  __device__ HeldParts(const NormArgs& args, int64_t which, int period) : M(args.M), period(period) {
    const int64_t kind = ROWS > 1 ? which & (period - 1) : 0;
    first_index = (which - kind) * ROWS + kind;
  }

  // Whether row r exists, given that the first one does.
  __device__ bool is_row(int r) const { return r == 0 || first_index + r * period < M; }

  // Writes the outputs, after the copies of weights and biases have arrived.
  template <Norm NORM, typename Factors>
  __device__ void write(T* out, const HeldPart<T, PACKS>& part, int single, const Factors& weights,
                        const Factors& biases) {
    constexpr bool CENTERED = NORM == Norm::LAYER;
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
