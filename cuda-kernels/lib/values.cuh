// A pack's elements in fp32.
#pragma once

#include <type_traits>

#include "common.cuh"

// A mask takes the upper bf16 of a word: the compiler would shift it down and up again.
template <typename T>
struct Values {
  float of[Pack<T>::SIZE];

  __device__ explicit Values(Pack<T> pack) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const uint32_t words[] = {pack.words.x, pack.words.y, pack.words.z, pack.words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        of[2 * j] = __uint_as_float(words[j] << 16);
        of[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000);
      }
    } else {
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) of[j] = to_float(pack[j]);
    }
  }
};
