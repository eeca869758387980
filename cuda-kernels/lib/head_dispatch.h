// The types and widths for which a kernel of heads is compiled.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "common.cuh"

// Calls function.template operator()<T, WIDTH>() with the C++ type of a dtype of 16 bits and with D, up to
// 128, padded to whole panels of 64 columns.
template <typename Function>
void dispatch_heads_of(Dtype dtype, int64_t D, Function function) {
  dispatch(dtype, [&]<typename T>(T) {
    if constexpr (std::is_same_v<T, float>) {
      throw std::runtime_error("dtype is fp32, must be bf16 or fp16: convert the operands");
    } else {
      D <= 64 ? function.template operator()<T, 64>() : function.template operator()<T, 128>();
    }
  });
}
