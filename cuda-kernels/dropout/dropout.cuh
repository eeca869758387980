// What the kernels of dropout_add and of its backward pass are made of.
#pragma once

#include <type_traits>

#include "dropout.h"
#include "lib/activation.cuh"
#include "lib/packs.cuh"
#include "philox.h"

// Says of elements whether they are kept.
class Mask {
  uint64_t seed_, offset_;
  uint32_t threshold_;
  bool all_;

 public:
  __device__ explicit Mask(const Dropout& dropout)
      : seed_(dropout.seed_at ? *dropout.seed_at : dropout.seed),
        offset_(dropout.offset + (dropout.offset_at ? *dropout.offset_at : 0)),
        threshold_(dropout.threshold),
        all_(dropout.all) {}

  // By the grid's first thread.
  __device__ void note(int64_t* used) const {
    if (used == nullptr || blockIdx.x > 0 || threadIdx.x > 0) return;
    used[0] = static_cast<int64_t>(seed_);
    used[1] = static_cast<int64_t>(offset_);
  }

  // For loops: left alone, the compiler keeps the keys of all ten rounds in registers.
  __device__ void forget_keys() { asm volatile("" : "+l"(seed_)); }

  // Element i, for which a whole call is made.
  __device__ bool keeps(int64_t i) const {
    const auto [w0, w1, w2, w3] = random_words(seed_, offset_, i / 4).of;
    return keeps(i & 2 ? (i & 1 ? w3 : w2) : (i & 1 ? w1 : w0));
  }

  // COUNT elements from i on; both are multiples of 4.
  template <int COUNT>
  __device__ void keeps(bool (&kept)[COUNT], int64_t i) const {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      if (j % 4 == 0) {
        const auto [w0, w1, w2, w3] = random_words(seed_, offset_, (i + j) / 4).of;
        kept[j] = keeps(w0), kept[j + 1] = keeps(w1), kept[j + 2] = keeps(w2), kept[j + 3] = keeps(w3);
      }
    }
  }

  // The same from start + i on, where both are multiples of COUNT, and of a power of two above i in start's
  // case. Then no sum is carried into the upper half of a block's number, and the compiler sees which
  // products of the first rounds are the same for several calls.
  template <int COUNT>
  __device__ void keeps(bool (&kept)[COUNT], int64_t start, uint32_t i) const {
    const uint64_t upper = static_cast<uint64_t>(start) >> 34 << 32;
    const uint32_t block = static_cast<uint32_t>(start >> 2) + i / 4;
#pragma unroll
    for (int j = 0; j < COUNT; j += 4) {
      const auto [w0, w1, w2, w3] = random_words(seed_, offset_, upper | (block + j / 4)).of;
      kept[j] = keeps(w0), kept[j + 1] = keeps(w1), kept[j + 2] = keeps(w2), kept[j + 3] = keeps(w3);
    }
  }

  // The same from any i on, which costs a call more.
  template <int COUNT>
  __device__ void keeps_anywhere(bool (&kept)[COUNT], int64_t i) const {
    bool around[COUNT + 4];
    keeps(around, i / 4 * 4);
    uint32_t bits = 0;  // an array is not shifted by a number that only a run knows
#pragma unroll
    for (int j = 0; j < COUNT + 4; ++j) bits |= static_cast<uint32_t>(around[j]) << j;
    bits >>= i % 4;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) kept[j] = bits >> j & 1;
  }

 private:
  __device__ bool keeps(uint32_t word) const { return word >= threshold_ && !all_; }
};

// An element's row and column.
struct Place {
  int64_t row, col;
};

// Of element i of rows of N. A division of 64 bits takes a hundred instructions, and seldom must.
__device__ inline Place place_of(int64_t i, int64_t N) {
  if (i < N) return {0, i};
  if (i >> 32 == 0) {
    const uint32_t row = static_cast<uint32_t>(i) / static_cast<uint32_t>(N);  // N is no larger than i
    return {row, i - row * N};
  }
  const int64_t row = i / N;
  return {row, i - row * N};
}

__device__ inline Place next(Place place, int64_t N) {
  return place.col + 1 < N ? Place{place.row, place.col + 1} : Place{place.row + 1, 0};
}

// As accurate as T: fp32 would show what gelu's short form errs by.
template <typename T, Activation ACTIVATION>
__device__ float activate_for(float x) {
  if constexpr (ACTIVATION == Activation::gelu && std::is_same_v<T, float>) {
    return 0.5f * x * (1.0f + erff(SQRT_HALF * x));
  } else {
    return activate<ACTIVATION>(x);
  }
}

// What a kept element's gradient becomes on its way back through scale and activation, which was applied to
// z.
template <Activation ACTIVATION>
__device__ float gradient(float dout, float z, float scale) {
  if constexpr (ACTIVATION == Activation::none) return dout * scale;
  const float slope = derivative<ACTIVATION>(z);
  // What relu holds back is nothing, even where the gradient is infinite.
  if (ACTIVATION == Activation::relu && slope == 0.0f) return 0.0f;
  return dout * scale * slope;
}

// Calls function.operator()<T, ACTIVATION>().
template <typename Function>
void dispatch(Dtype dtype, Activation activation, Function function) {
  dispatch(dtype, [&](auto zero) {
    with_activation(activation, [&]<Activation ACTIVATION>() {
      function.template operator()<decltype(zero), ACTIVATION>();
    });
  });
}
