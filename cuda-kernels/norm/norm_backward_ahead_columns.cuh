// What a thread of norm_backward_ahead.cuh's kernel does with its columns of a row. Terms: docs/glossary.md.
#pragma once

#include "norm_backward.cuh"

// How rows lie. LINED: all parts of all rows are whole lines. ALIKE: a row has the same skew in all matrices.
// DIFFER: it may have another skew in each.
enum class Layout { LINED, ALIKE, DIFFER };
// Whether there is a weight. Without it there are no column sums either.
enum class Affine { NONE, GIVEN };

// In place of a pack of weights: ones.
struct NoWeights {
  __device__ float operator[](int) const { return 1.0f; }
};

// A block's part of a row in shared memory: its elements start `shift` elements behind `packs`.
template <typename T>
struct StagedPart {
  const Pack<T>* packs;
  int shift;

  // The pack of elements from `first` on, shifted together from two. Elements outside of the part are
  // arbitrary.
  __device__ Pack<T> at(int first) const {
    constexpr int SIZE = Pack<T>::SIZE;
    const int place = shift + first + SIZE,
              low = place / SIZE - 1;  // first may be negative, down to 1 - SIZE
    return put_together<T>(packs[max(low, 0)].words, packs[low + 1].words, place % SIZE);
  }
};

// A thread's columns, the same in all rows of its block, and its sums over these rows for dweight and dbias.
// LINED: the packs of a stage behind the block's part are 0, and stay 0. Where skews DIFFER, packs are
// counted from the part's first element; dx is computed in packs of its own rows.
template <typename T, int PACKS, Norm NORM, Layout LAYOUT, Affine AFFINE>
struct AheadColumns {
  static constexpr int SIZE = Pack<T>::SIZE;
  static constexpr bool CENTERED = NORM == Norm::LAYER;
  static constexpr bool LINED = LAYOUT == Layout::LINED, DIFFER = LAYOUT == Layout::DIFFER;
  static constexpr bool HAS_WEIGHT = AFFINE == Affine::GIVEN, HOLDS_WEIGHT = HAS_WEIGHT && !DIFFER;
  int n, skew;  // the elements of the block's part of a row, and those before it in its first pack
  bool ragged;  // whether a pack of the thread reaches beyond the part
  StagedPart<T> staged_weights;  // if skews differ
  Pack<T> weights[HOLDS_WEIGHT ? PACKS : 1];
  float dweight[HAS_WEIGHT ? PACKS : 1][SIZE] = {};
  float dbias[HAS_WEIGHT && CENTERED ? PACKS : 1][HAS_WEIGHT && CENTERED ? SIZE : 1] = {};

  // `place`: of the weights in shared memory, if skews differ. Then a barrier must follow.
  __device__ AheadColumns(const void* weight, int start, int n, int skew, Pack<T>* place)
      : n(n), skew(skew), ragged(false), staged_weights{place, 0} {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      ragged = ragged || (first_of(i) < n && !is_whole<T>(first_of(i), n));
      if constexpr (HOLDS_WEIGHT) weights[i] = load_weights<T>(weight, start, first_of(i), n);
      if (HAS_WEIGHT && DIFFER && first_of(i) < n)
        place[pack_of(i)] = load_weights<T>(weight, start, first_of(i), n);
    }
  }

  __device__ int pack_of(int i) const { return i * blockDim.x + threadIdx.x; }
  __device__ int first_of(int i) const { return pack_of(i) * SIZE - skew; }

  // Weights, converted anew for every use: common-subexpression elimination (CSE) would keep the converted
  // ones, in twice the registers.
  __device__ Pack<T> weight_of(int i, int first) {
    if constexpr (HOLDS_WEIGHT) {
      keep_packed(weights[i]);
      return weights[i];
    }
    return HAS_WEIGHT ? read_shifted(staged_weights, first) : Pack<T>{};
  }
  // The product with a weight, if there are weights.
  __device__ static float weighted(float gradient, const Pack<T>& weight, int j) {
    return HAS_WEIGHT ? gradient * to_float(weight[j]) : gradient;
  }

  __device__ bool holds(int i) const { return LINED || first_of(i) < n; }
  // Whether the loop over packs may stop before the i-th. It tests every second pack: with a test a pack,
  // each load would be waited for, and with fewer tests the loads would take too many registers.
  __device__ bool ends_before(int i, int first) const { return !LINED && i > 0 && i % 2 == 0 && first >= n; }
  // The pack of elements from `first` on where skews differ; 0 behind the part. There the part's first pack
  // is read and cleared, because a branch would make the thread wait for the packs that it has asked for
  // before.
  __device__ Pack<T> read_shifted(const StagedPart<T>& part, int first) const {
    Pack<T> pack = part.at(first < n ? first : 0);
    if (first >= n) pack = {};
    return pack;
  }
  // The thread's i-th pack, from element `first` on.
  __device__ Pack<T> read(const StagedPart<T>& part, int i, int first) const {
    if constexpr (DIFFER) return read_shifted(part, first);
    if (!LINED && first >= n) return {};
    return part.packs[pack_of(i)];
  }

  // Clears the packs of a stage behind the part. Once is enough, since no copy writes there.
  __device__ void clear(Pack<T>* packs) const {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (first_of(i) >= n) packs[pack_of(i)] = {};
    }
  }

  // Adds a row to the columns' sums, and returns the row's sums over this thread's elements; `product` lacks
  // its factor rstd.
  __device__ GradientSums add(const StagedPart<T>& x_part, const StagedPart<T>& dout_part, float mean,
                              float rstd) {
    GradientSums sums = {};
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int first = first_of(i);
      if (ends_before(i, first)) break;
      Pack<T> x = read(x_part, i, first), dout = read(dout_part, i, first);
      const Pack<T> weight = weight_of(i, first);
      if (!LINED && ragged) {  // 0 for elements outside of the part
        mask_beside(x, first, n);
        mask_beside(dout, first, n);
      }
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float distance = CENTERED ? to_float(x[j]) - mean : to_float(x[j]);
        const float gradient = to_float(dout[j]);
        if constexpr (HAS_WEIGHT) {
          dweight[i][j] = fmaf(gradient * rstd, distance, dweight[i][j]);
          if constexpr (CENTERED) dbias[i][j] += gradient;
        }
        const float g = weighted(gradient, weight, j);
        sums.product = fmaf(g, distance, sums.product);
        if constexpr (CENTERED) sums.plain += g;
        if constexpr (HAS_WEIGHT) {
          // Keeps the compiler from deferring these: the factors would take registers until the sums are
          // sent.
          asm volatile("" : "+f"(dweight[i][j]));
          if constexpr (CENTERED) asm volatile("" : "+f"(dbias[i][j]));
        }
      }
    }
    return sums;
  }

  // Writes dx, from the block's first element on. `means` are the whole row's sums divided by N. added_part
  // has no packs if there is no dadded.
  __device__ void write(const StagedPart<T>& x_part, const StagedPart<T>& dout_part,
                        const StagedPart<T>& added_part, T* dx, float mean, float rstd, GradientSums means) {
    const float of_distance = -means.product * rstd * rstd * rstd, of_all = -means.plain * rstd;
    const int moved = DIFFER ? skew_of(dx) : 0;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      int first = first_of(i) - moved;
      if (ends_before(i, first)) break;
      const Pack<T> x = read(x_part, i, first), dout = read(dout_part, i, first);
      const Pack<T> weight = weight_of(i, first);
      const Pack<T> added = added_part.packs ? read(added_part, i, first) : Pack<T>{};
      Pack<T> results;
#pragma unroll
      for (int j = 0; j < SIZE; ++j) {
        const float distance = CENTERED ? to_float(x[j]) - mean : to_float(x[j]);
        const float rest = fmaf(distance, of_distance, of_all + to_float(added[j]));
        const float gradient = to_float(dout[j]) * rstd;
        set(results, j,
            from_float<T>(HAS_WEIGHT ? fmaf(gradient, to_float(weight[j]), rest) : gradient + rest));
      }
      asm volatile("" : "+r"(first));  // against CSE: addresses kept from row to row take registers
      if (!LINED) {
        store_pack(dx, first, n, true, results);
      } else if (first < n) {
        __stwb(reinterpret_cast<uint4*>(dx + first), results.words);
      }
    }
  }
};
