// Device code of dropout_add and of its backward pass: the mask, elements' places, activations. Terms:
// docs/glossary.md.
#pragma once

#include <type_traits>

#include "dropout.h"
#include "lib/activation.cuh"
#include "lib/packs.cuh"
#include "philox.h"

// The dropout mask: which elements are kept.
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

  // The grid's first thread stores seed and offset for the backward pass.
  __device__ void note(int64_t* used) const {
    if (used == nullptr || blockIdx.x > 0 || threadIdx.x > 0) return;
    used[0] = static_cast<int64_t>(seed_);
    used[1] = static_cast<int64_t>(offset_);
  }

  // In loops, against CSE: the compiler would keep the keys of all ten rounds in registers.
  __device__ void forget_keys() { asm volatile("" : "+l"(seed_)); }

  // Element i alone, at the price of a whole Philox call.
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

  // COUNT elements from start + i on. Both are multiples of COUNT, and start is a multiple of a power of two
  // above i: so the sum carries nothing into the upper half of a Philox block's number, and the compiler sees
  // which products of the first rounds several calls share.
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

  // COUNT elements from any i on, at the price of one more Philox call.
  template <int COUNT>
  __device__ void keeps_anywhere(bool (&kept)[COUNT], int64_t i) const {
    bool around[COUNT + 4];
    keeps(around, i / 4 * 4);
    uint32_t bits = 0;  // an array cannot be shifted by a runtime number in registers
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

// The place of element i in rows of N. It avoids the division of 64 bits, a hundred instructions, wherever 32
// bits are enough.
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

// The activation, as accurate as T is: the error of gelu's short form would show in fp32.
template <typename T, Activation ACTIVATION>
__device__ float activate_for(float x) {
  if constexpr (ACTIVATION == Activation::gelu && std::is_same_v<T, float>) {
    return 0.5f * x * (1.0f + erff(SQRT_HALF * x));
  } else {
    return activate<ACTIVATION>(x);
  }
}

// The gradient of a kept element, back through the scale and through the activation, whose argument was z.
template <Activation ACTIVATION>
__device__ float gradient(float dout, float z, float scale) {
  if constexpr (ACTIVATION == Activation::none) return dout * scale;
  const float slope = derivative<ACTIVATION>(z);
  // 0 even for an infinite gradient, where the product would be NaN.
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
