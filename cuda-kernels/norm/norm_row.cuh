// The register-resident row of the lanes of a warp or of a block: its loads, sums and stores. Used by
// layer_norm's v04 and v12, and by rms_norm's v02 and v07. Terms: docs/glossary.md.
#pragma once

#include "norm.cuh"

// n elements as packs, spread over `threads` threads, of which this is number `thread`. Packs are those of
// memory, so the first and the last may reach beyond the row; elements there are 0.
template <typename T, int PACKS, Norm NORM, Alignment ALIGNMENT>
struct RegisterRow {
  static constexpr int SIZE = Pack<T>::SIZE;
  static constexpr bool CENTERED = NORM == Norm::LAYER, WHOLE = ALIGNMENT != Alignment::ELEMENT;
  Pack<T> packs[PACKS];
  int n, skew, thread, threads;

  __device__ RegisterRow(int64_t n, int skew, int thread, int threads)
      : n(static_cast<int>(n)), skew(WHOLE ? 0 : skew), thread(thread), threads(threads) {}

  __device__ int first_of(int i) const { return (i * threads + thread) * SIZE - skew; }

  // Issues the loads of row number `index`; finish_load waits for them. A pack that reaches beyond the end of
  // x is left to finish_load, which loads it element by element.
  __device__ void load(const NormArgs& args, const NormRow<T>& row, int64_t index) {
    if (!WHOLE) at_end = (args.M - 1 - index) * args.stride_xm < SIZE;
    load_touching_packs(
        packs, row.x, n, [this](int i) { return first_of(i); }, !WHOLE && at_end ? n : INT_MAX);
  }
  __device__ void finish_load(const NormRow<T>& row) {
    if (!WHOLE && at_end) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) {
        const int first = first_of(i);
        if (first < n && first + SIZE > n) packs[i] = load_ragged(row.x, first, n, 0.0f);
      }
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int first = first_of(i);
      if (!WHOLE) mask_beside(packs[i], first, n);
      if (row.residual) packs[i] = add_residual(row, packs[i], first, n);
    }
  }

  // The sum of this thread's elements.
  __device__ float sum() {
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(packs[i]);
#pragma unroll
      for (int j = 0; j < SIZE; ++j) mine += to_float(packs[i][j]);
    }
    return mine;
  }

  // The sum of this thread's squared distances from the mean.
  __device__ float squares(float mean) {
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      keep_packed(packs[i]);
      const int first = first_of(i);
      if (!CENTERED || (WHOLE ? first < n : is_whole<T>(first, n))) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
          const float distance = CENTERED ? to_float(packs[i][j]) - mean : to_float(packs[i][j]);
          mine = fmaf(distance, distance, mine);
        }
      } else if (!WHOLE && first < n) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) {
          const float distance = to_float(packs[i][j]) - mean;
          if (first + j >= 0 && first + j < n) mine = fmaf(distance, distance, mine);
        }
      }
    }
    return mine;
  }

  // Writes the output. weight_of(i, first) and bias_of(i, first) return packs; they are called only if there
  // is a weight, or a bias.
  template <typename WeightOf, typename BiasOf>
  __device__ void write(const NormRow<T>& row, float mean, float rstd, WeightOf weight_of, BiasOf bias_of) {
    const bool aligned = WHOLE || skew_of(row.out) == skew % SIZE;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int first = first_of(i);
      if (first >= n) break;
      keep_packed(packs[i]);
      const Pack<T> results = normalised<NORM>(
          row, packs[i], mean, rstd, [&] { return weight_of(i, first); }, [&] { return bias_of(i, first); });
      if (WHOLE) {
        __stwb(reinterpret_cast<uint4*>(row.out + first), results.words);
      } else {
        store_pack(row.out, first, n, aligned, results);
      }
    }
  }
  __device__ void write(const NormRow<T>& row, float mean, float rstd) {
    const auto load = [&](const T* factors, int first) {
      return WHOLE ? Pack<T>{__ldg(reinterpret_cast<const uint4*>(factors + first))}
                   : load_factors(factors, first, n);
    };
    write(
        row, mean, rstd, [&](int, int first) { return load(row.weight, first); },
        [&](int, int first) { return load(row.bias, first); });
  }

 private:
  bool at_end;  // whether a pack of the row may reach beyond the end of x
};
