// Totals: what a thread accumulates, a sum, a maximum, or the index of one.
#pragma once

#include "args.h"
#include "lib/merge.cuh"
#include "lib/pack_reductions.cuh"

// The interface of a total: none(); add(element, its index); add(pack, index of its first element, step of
// the index); merge(another total); of_lane(mask), the total of the lane whose number differs by `mask`.
// Sum and Max have result(divisor), in fp32.

struct Sum {
  float value;

  __device__ static Sum none() { return {0.0f}; }
  template <typename T>
  __device__ void add(T element, int64_t) {
    value += to_float(element);
  }
  template <typename T>
  __device__ void add(const Pack<T>& pack, int64_t, int64_t) {
    value += sum_of(pack);
  }
  __device__ void merge(const Sum& other) { value += other.value; }
  __device__ Sum of_lane(int mask) const { return {__shfl_xor_sync(0xffffffff, value, mask)}; }
  __device__ float result(float divisor) const { return value / divisor; }
};

struct Max {
  float value;

  __device__ static Max none() { return {-INFINITY}; }
  template <typename T>
  __device__ void add(T element, int64_t) {
    value = larger(value, to_float(element));
  }
  template <typename T>
  __device__ void add(const Pack<T>& pack, int64_t, int64_t) {
    value = larger(value, largest(pack));
  }
  __device__ void merge(const Max& other) { value = larger(value, other.value); }
  __device__ Max of_lane(int mask) const { return {__shfl_xor_sync(0xffffffff, value, mask)}; }
  __device__ float result(float) const { return value; }
};

// The index of the maximum. Of equal elements the first one counts, of NaNs the first NaN, whatever the order
// in which they are added.
struct ArgMax {
  float value;
  int64_t place;

  __device__ static ArgMax none() { return {-INFINITY, INT64_MAX}; }
  __device__ void take(float other, int64_t at) {
    const bool first = at < place;
    if (other > value || (other == value && first) || (isnan(other) && (first || !isnan(value)))) {
      value = other;
      place = at;
    }
  }
  template <typename T>
  __device__ void add(T element, int64_t at) {
    take(to_float(element), at);
  }
  // Few packs change the total, but one of a warp's 32 lanes often has such a pack, and then all wait. So the
  // pack's largest element is compared first, and its index is searched only if that one wins. An equal
  // element loses if its pack does not begin before `place`. NaN passes both tests, and so does -inf into an
  // empty total, whose place is beyond all others.
  template <typename T>
  __device__ void add(const Pack<T>& pack, int64_t at, int64_t step) {
    const float most = largest(pack);
    if (most < value || (most == value && at >= place)) return;
    int first = 0;  // the first element that equals it, or is NaN
#pragma unroll
    for (int i = Pack<T>::SIZE - 1; i >= 0; --i) {
      const float element = to_float(pack[i]);
      if (element == most || isnan(element)) first = i;
    }
    take(most, at + first * step);
  }
  __device__ void merge(const ArgMax& other) { take(other.value, other.place); }
  __device__ ArgMax of_lane(int mask) const {
    return {__shfl_xor_sync(0xffffffff, value, mask), __shfl_xor_sync(0xffffffff, place, mask)};
  }
};

// Stores a result as element `at` of out: a number rounded to T, or an index.
template <typename T, typename Total>
__device__ void store(const Total& total, void* out, int64_t at, float divisor) {
  static_cast<T*>(out)[at] = from_float<T>(total.result(divisor));
}
template <typename T>
__device__ void store(const ArgMax& total, void* out, int64_t at, float) {
  static_cast<int64_t*>(out)[at] = total.place;
}

// Calls function(T{}, Total{}) with the C++ types of the dtype and the kind.
template <typename Function>
void dispatch_totals(const ReductionNdArgs& args, Function function) {
  dispatch(args.dtype, [&](auto zero) {
    switch (args.kind) {
      case ReductionKind::sum:
      case ReductionKind::mean:
        return function(zero, Sum{});
      case ReductionKind::max:
        return function(zero, Max{});
      case ReductionKind::argmax:
        return function(zero, ArgMax{});
    }
  });
}
