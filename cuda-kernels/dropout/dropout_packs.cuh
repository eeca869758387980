// A matrix as packs that are counted through all of its rows, for steps of dropout_add and of its backward
// pass. Terms: docs/glossary.md.
#pragma once

#include "drawn_first.cuh"
#include "lib/bias_packs.cuh"
#include "lib/pack_layout.cuh"
#include "operand.h"

// The operands of a pass, forward or backward.
struct PackArgs : MatrixOperands {
  Dropout dropout;
};

// The pack from element `at` on, by accesses of single elements. results_of(kept, first, second, bias)
// returns the pack to store; a missing operand is -0, which changes no sum.
template <typename T, typename Results>
__device__ void take_elements(const PackArgs& args, int64_t at, Results results_of) {
  constexpr int SIZE = Pack<T>::SIZE;
  const Mask mask(args.dropout);
  mask.note(args.dropout.used);
  const int64_t left = args.M * args.N - at;
  if (left <= 0) return;
  const int count = left < SIZE ? static_cast<int>(left) : SIZE;
  const Place place = place_of(at, args.N);
  const Pack<T> first = load_elements<T>(args.first, args.stride_first, place, args.N, count);
  Pack<T> second, bias;
#pragma unroll
  for (int j = 0; j < SIZE; ++j) set(second, j, from_float<T>(-0.0f));
  bias = second;
  if (args.second) second = load_elements<T>(args.second, args.stride_second, place, args.N, count);
  if (args.bias) bias = load_elements<T>(args.bias, 0, place, args.N, count);
  bool kept[SIZE];
  mask.keeps(kept, at);
  store_pack(static_cast<T*>(args.out) + at, 0, count, false, results_of(kept, first, second, bias));
}

// So, a pack a thread.
template <typename T, int THREADS, typename Results>
__device__ void take_single_elements(const PackArgs& args, Results results_of) {
  // The block's index is widened first: 2^31 elements and more overflow 32 bits.
  const int64_t pack = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  take_elements<T>(args, pack * Pack<T>::SIZE, results_of);
}

// PACKS aligned packs a thread, a block's width apart. All loads are issued before the seed is read. SECOND
// and BIAS are template arguments, since with a branch between drawing a mask and its use the compiler would
// keep every decision in a register.
template <typename T, Operand SECOND, Operand BIAS, int PACKS, int THREADS, typename Results>
__device__ void take_packs(const PackArgs& args, const PackLayout& layout, Results results_of) {
  constexpr int SIZE = Pack<T>::SIZE, STEP = THREADS * SIZE;
  constexpr bool HAS_SECOND = SECOND == Operand::GIVEN, HAS_BIAS = BIAS == Operand::GIVEN;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * (PACKS * STEP);
  const auto left = static_cast<uint32_t>(min(args.M * args.N - start, int64_t{PACKS * STEP}));
  const uint32_t mine = threadIdx.x * SIZE;
  const auto is_mine = [&](uint32_t i) { return threadIdx.x + i * THREADS < left / SIZE; };

  Pack<T> first[PACKS] = {}, second[PACKS] = {}, bias[PACKS] = {};
  const auto load = [&](int i, Place place) {
    load_if(is_mine(i), pack_at<T>(args.first, args.stride_first, place), first[i].words);
    if (HAS_SECOND) load_if(is_mine(i), pack_at<T>(args.second, args.stride_second, place), second[i].words);
  };
  if (layout.end_to_end) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) load(i, {0, start + mine + i * STEP});
  }
  if (HAS_BIAS || !layout.end_to_end) {
    Place places[PACKS] = {place_of(start + mine, args.N)};
#pragma unroll
    for (int i = 1; i < PACKS; ++i) {
      places[i] = place_after(places[i - 1], layout.step_rows, layout.step_cols, args.N);
    }
    if (!layout.end_to_end) {
#pragma unroll
      for (int i = 0; i < PACKS; ++i) load(i, places[i]);
    }
    // After all other loads: loading a bias branches, and waits for single elements.
    if (HAS_BIAS) load_bias_packs(bias, args.bias, layout.wide_bias, places, args.N, layout.zero);
  }

  const Mask mask(args.dropout);
  auto* out = reinterpret_cast<uint4*>(static_cast<T*>(args.out) + start);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    bool kept[SIZE];
    keeps_from(mask, kept, start, mine + i * STEP);
    take_after(kept, layout.zero, first[i]);
    if (HAS_SECOND) take_after(kept, layout.zero, second[i]);
    if (HAS_BIAS) take_after(kept, layout.zero, bias[i]);
    const Pack<T> results = results_of(kept, first[i], second[i], bias[i]);
    store_if(is_mine(i), out + (threadIdx.x + i * THREADS), results);
  }
  mask.note(args.dropout.used);
  // The matrix's last elements, fewer than a pack, go to one thread each.
  if (threadIdx.x < left % SIZE) {
    const int64_t at = start + left / SIZE * SIZE + threadIdx.x;
    const Place place = place_of(at, args.N);
    const auto element = [&](const void* matrix, int64_t stride) {
      Pack<T> pack = {};
      if (matrix) set(pack, 0, static_cast<const T*>(matrix)[place.row * stride + place.col]);
      return pack;
    };
    bool kept[SIZE] = {mask.keeps(at)};
    static_cast<T*>(args.out)[at] =
        results_of(kept, element(args.first, args.stride_first), element(args.second, args.stride_second),
                   element(args.bias, 0))[0];
  }
}
