// The gradient of a row, and writing a thread's packs of it.
#pragma once

#include "args.h"
#include "lib/load_if.cuh"
#include "lib/packs.cuh"

// The gradient of a row's loss. T is the dtype of the logits.
template <typename T>
__device__ float dout_of(const CrossEntropyBackwardArgs& args, int64_t row) {
  const bool is_wide = args.dout_dtype == Dtype::fp32;
  const void* const place = static_cast<const char*>(args.dout) + row * args.stride_dm * (is_wide ? 4 : 2);
  float dout;
  if constexpr (sizeof(T) == 4) {
    dout = *static_cast<const float*>(place);
  } else {
    dout = is_wide ? *static_cast<const float*>(place) : to_float(*static_cast<const T*>(place));
  }
  return args.scale ? dout * *args.scale : dout;
}

// The gradient at logit x of a row; `hit` says whether x is the target's.
struct RowGradient {
  float lse, dout, shared, all;  // `shared`: wanted probability of every class, `all`: of the target

  // A target that is no class makes the whole row NaN, as it makes the loss.
  __device__ RowGradient(const CrossEntropyBackwardArgs& args, int64_t target, float lse, float dout)
      : lse(lse),
        dout(target >= 0 && target < args.N ? dout : NAN),
        shared(args.smoothing / static_cast<float>(args.N)),
        all(shared + (1.0f - args.smoothing)) {}

  __device__ float operator()(float x, bool hit) const {
    return (exp_of(x - lse) - (hit ? all : shared)) * dout;
  }
};

// Writes the gradient of the packs that start at first_of(i). `row_out` may be `row_logits`: a thread loads
// all of its packs before it writes the first, and no other thread uses their elements.
template <int PACKS, typename T, typename First>
__device__ void write_gradient(const CrossEntropyBackwardArgs& args, int64_t row, const T* row_logits,
                               T* row_out, First first_of) {
  const int N = static_cast<int>(args.N);
  const bool aligned = skew_of(row_out) == skew_of(row_logits);
  // A ragged pack is loaded as one word with what lies beside the row, where that is within the matrix; only
  // the row's elements are stored.
  const int64_t before = row * args.stride_lm, behind = (args.M - 1 - row) * args.stride_lm;
  const bool inner = before >= Pack<T>::SIZE && behind >= Pack<T>::SIZE;
  Pack<T> packs[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int first = first_of(i);
    const bool touches = first < N && first + Pack<T>::SIZE > 0;
    packs[i] = {};
    load_if<Reading::USUAL>(is_whole<T>(first, N) || (inner && touches), row_logits + first, packs[i].words);
  }
  const int64_t target = args.target[row];
  const float lse = args.lse[row];
  if (!inner) load_other_packs(packs, row_logits, N, true, 0.0f, first_of);
  const float dout = dout_of<T>(args, row);  // not before: it would take registers of the ragged packs
  const bool ignored = target == args.ignore_index;
  const RowGradient gradient(args, target, lse, dout);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int first = first_of(i);
    Pack<T> result;
#pragma unroll
    for (int j = 0; j < Pack<T>::SIZE; ++j) {
      const float value = gradient(to_float(packs[i][j]), first + j == target);
      set(result, j, from_float<T>(ignored ? 0.0f : value));
    }
    store_pack(row_out, first, N, aligned, result);
  }
}
