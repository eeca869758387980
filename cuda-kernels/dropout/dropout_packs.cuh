// A matrix as packs that are counted through all of its rows, for steps of dropout_add and of its backward
// pass. Terms: docs/glossary.md.
#pragma once

#include "drawn_first.cuh"
#include "matrix_packs.cuh"
#include "operand.h"

// The operands of a pass, forward or backward: two inputs and a bias, one output.
struct PackArgs {
  const void* first;
  const void* second;  // or null
  const void* bias;    // [N]; or null
  void* out;           // [M, N], contiguous; first and second: [M, N], rows contiguous
  int64_t M, N;
  int64_t stride_first, stride_second;  // in elements
  Dropout dropout;
};

// How packs lie in memory. If rows lie end to end, a pack has the same offset in first and second as in out.
struct PackLayout {
  bool wide;        // packs are aligned, but for the matrix's last elements; a bias has one pack at least
  bool end_to_end;  // the rows of first and second, one behind the other
  bool wide_bias;   // packs of the bias are aligned, and none spans two rows
  int64_t step_rows, step_cols;  // from one of a thread's packs to the next one
  uint32_t zero;                 // 0, unknown to the compiler: see add_nothing
};

template <typename T, int THREADS>
PackLayout layout_of(const PackArgs& args) {
  constexpr int64_t SIZE = Pack<T>::SIZE, STEP = THREADS * SIZE;
  const bool end_to_end = args.M == 1 || (args.stride_first == args.N &&
                                          (args.second == nullptr || args.stride_second == args.N));
  const bool whole = args.N % SIZE == 0 && args.stride_first % SIZE == 0 &&
                     (args.second == nullptr || args.stride_second % SIZE == 0);
  const bool aligned = aligned_to_16_bytes(args.first, args.second, args.out);
  return {(end_to_end || whole) && aligned && (args.bias == nullptr || args.N >= SIZE),
          end_to_end,
          args.N % SIZE == 0 && aligned_to_16_bytes(args.bias),
          STEP / args.N,
          STEP % args.N,
          0};
}

// Loads a pack of the bias for each place; past the last column a pack continues with column 0. The bias has
// at least a pack of elements. If its packs are not aligned, single elements of all packs are under way
// before one is waited for, and a pack in which a row ends, which is rare, is loaded again. Wide loads come
// last: loads of single elements write to the same registers, and would wait for them and for all loads
// before.
template <typename T, int PACKS>
__device__ void load_bias_packs(Pack<T> (&packs)[PACKS], const void* bias, bool wide,
                                const Place (&places)[PACKS], int64_t N, uint32_t zero) {
  constexpr int SIZE = Pack<T>::SIZE;
  const T* elements = static_cast<const T*>(bias);
  if (!wide) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      packs[i] = load_ragged(elements + min(places[i].col, N - SIZE), 0, SIZE, 0.0f);
    }
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      if (places[i].col + SIZE > N) packs[i] = load_elements<T>(bias, 0, {0, places[i].col}, N, SIZE);
      // Waits here: else the wide loads below would wait, whether their predicate is true or not.
      if (sizeof(T) == 4) add_nothing(packs[i], zero);
    }
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    load_if<Reading::AGAIN>(wide, reinterpret_cast<const uint4*>(elements + places[i].col), packs[i]);
  }
}

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

__device__ inline Place place_after(Place place, int64_t rows, int64_t cols, int64_t N) {
  place = {place.row + rows, place.col + cols};
  return place.col < N ? place : Place{place.row + 1, place.col - N};
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
    load_if(is_mine(i), pack_at<T>(args.first, args.stride_first, place), first[i]);
    if (HAS_SECOND) load_if(is_mine(i), pack_at<T>(args.second, args.stride_second, place), second[i]);
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
