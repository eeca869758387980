// dx and the partial sums of its columns, for rows of dout or x that start elsewhere within 16 bytes than
// those of dx. Terms: docs/glossary.md.
#pragma once

#include "dropout/dropout_shifted.cuh"
#include "gradient_pack.cuh"
#include "lib/row_chunks.cuh"

// How many rows at either end of dout and x are loaded element by element: aligned words that hold elements
// of the other rows lie within the matrices.
template <typename T>
int64_t edge_rows(const DropoutAddBackwardArgs& args) {
  const int64_t least = args.x ? std::min(args.stride_dm, args.stride_xm) : args.stride_dm;
  return least > 0 ? cdiv(2 * Pack<T>::SIZE, least) : args.M;
}

// Packs of a thread are aligned in dx, and have the same columns in all of its rows; those of dout and x are
// shifted together. ROWS rows of a thread are under way. partials: [chunks, N].
template <typename T, Activation ACTIVATION, int ROWS, int THREADS>
__device__ void take_shifted_rows(const DropoutAddBackwardArgs& args, const RowLayout& layout, int64_t edge,
                                  float* partials) {
  constexpr int SIZE = Pack<T>::SIZE;
  constexpr bool SLOPES = ACTIVATION != Activation::none;
  constexpr Operand BIAS = SLOPES ? Operand::GIVEN : Operand::MISSING;
  __shared__ float totals[THREADS * SIZE];
  const int lane = threadIdx.x % layout.lanes, group = threadIdx.x / layout.lanes;
  const int strip = blockIdx.x % layout.strips, chunk = blockIdx.x / layout.strips;
  const int64_t first = layout.first_row(chunk, group),
                step = static_cast<int64_t>(layout.chunks) * layout.groups;
  const int skew = static_cast<int>(chunk % layout.period * args.N % SIZE);
  const int64_t strip_col = static_cast<int64_t>(strip) * layout.lanes * SIZE - skew,
                col = strip_col + lane * SIZE;
  // The elements of this pack that belong to the row: `count` of them, from `begin` on.
  const int begin = static_cast<int>(max(-col, int64_t{0}));
  const int count = static_cast<int>(min(args.N - col, int64_t{SIZE})) - begin;
  const int most = layout.turns;
  const int turns = count <= 0 ? 0 : first + (most - 1) * step < args.M ? most : most - 1;

  const auto row_of = [&](int turn) { return first + turn * step; };
  const auto is_inner = [&](int64_t row) { return row >= edge && row < args.M - edge; };
  const auto place_of_row = [&](const void* matrix, int64_t stride, int64_t row) {
    return static_cast<const T*>(matrix) + row * stride + col;
  };
  ShiftedPack<T> douts[ROWS], xs[ROWS];
  const auto load = [&](int i, int turn) {
    const int64_t row = row_of(turn);
    const bool wanted = turn < turns && is_inner(row);
    douts[i] = {place_of_row(args.dout, args.stride_dm, row), wanted};
    if constexpr (SLOPES) xs[i] = {place_of_row(args.x, args.stride_xm, row), wanted};
  };
#pragma unroll
  for (int i = 0; i < ROWS; ++i) load(i, i);

  const Mask mask(args.dropout);
  Pack<T> bias = {};
  if (SLOPES && args.bias && turns > 0) {
    bias = load_ragged(static_cast<const T*>(args.bias) + col + begin, -begin, count, 0.0f);
  }
  float sums[SIZE] = {};
  // All threads run as many turns, as in v04.
  for (int turn = 0; turn < most; turn += ROWS) {
    Pack<T> taken_douts[ROWS], taken_xs[ROWS] = {};
    const auto take = [&](int i, uint32_t nothing) {
      const int64_t row = row_of(turn + i);
      taken_douts[i] = douts[i].together(nothing);
      if (SLOPES) taken_xs[i] = xs[i].together(nothing);
      if (turn + i < turns && !is_inner(row)) {
        const auto load_row = [&](const void* matrix, int64_t stride) {
          return load_ragged(place_of_row(matrix, stride, row) + begin, -begin, count, 0.0f);
        };
        taken_douts[i] = load_row(args.dout, args.stride_dm);
        if (SLOPES) taken_xs[i] = load_row(args.x, args.stride_xm);
      }
      load(i, turn + ROWS + i);
    };
    // All rows at once: the compiler waits for their loads as for one.
    if (!SLOPES) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) take(i, 0);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const bool is_row = turn + i < turns;
      const int64_t at = row_of(turn + i) * args.N + col;
      bool kept[SIZE];
      keeps_from(mask, kept, at, 0);
      if (SLOPES) take(i, kept[SIZE - 1] ? layout.zero : 0);
      const Gradients<T, ACTIVATION, BIAS> dx(kept, taken_douts[i], taken_xs[i], bias, args.dropout.scale);
      T* const dx_at = static_cast<T*>(args.dx) + at;
      if (is_row) {
#pragma unroll
        for (int j = 0; j < SIZE; ++j) sums[j] += dx.of[j];
      }
      store_if(is_row && count == SIZE, reinterpret_cast<uint4*>(dx_at), dx.rounded());
      if (is_row && count < SIZE) {
        int behind = begin;
        asm volatile("" : "+r"(behind));  // against CSE of eight stores' conditions from row to row
        store_pack(dx_at + behind, -behind, count, false, dx.rounded());
      }
    }
  }

#pragma unroll
  for (int j = 0; j < SIZE; ++j) totals[threadIdx.x * SIZE + j] = sums[j];
  __syncthreads();  // for the sums of all groups
  add_groups(totals, layout, layout.lanes * SIZE, strip_col, args.N, partials + chunk * args.N);
}
