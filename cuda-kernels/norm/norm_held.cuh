// Register-resident parts of rows: a warp's statistics, and its result. Used by layer_norm from v08 on and by
// rms_norm from v05 on. Terms: docs/glossary.md.
#pragma once

#include "lib/held_factors.cuh"
#include "norm_mean_squares.h"
#include "norm_statistics.cuh"

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
  constexpr int EACH = MOST_HELD_PARTS / 32;
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
