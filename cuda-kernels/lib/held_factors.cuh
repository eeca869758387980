// Weights and biases in shared memory, for register-resident parts of rows. Terms: docs/glossary.md.
#pragma once

#include "alignment.h"
#include "held.cuh"
#include "lib/ptx/ampere.cuh"

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
      if (factors && (ALIGNED || whole))
        cp_async<16, Caches::L1_AND_L2>(pack, place + THREADS * i * SIZE, whole);
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
