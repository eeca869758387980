// Tensor maps of heads: tensors [B, heads, S, D], copied by the TMA in boxes of one head's rows. Host code.
#pragma once

#include <array>
#include <string>

#include "head_strides.h"
#include "tensor_map.h"

// Exclusive limit of S. A row's number and a band's limit are added in 32 bits.
constexpr int64_t LARGEST_LENGTH = (int64_t{1} << 30) - 1024;

// Bytes between neighbours of D's rows, of heads and of batches. What a dimension of size 1 says is never
// used, so it gets a valid value.
inline std::array<cuuint64_t, 3> head_pitches(Dtype dtype, int64_t B, int64_t heads, int64_t S, int64_t D,
                                              HeadStrides stride) {
  const auto pitch = [&](int64_t size, int64_t elements) {
    return static_cast<cuuint64_t>((size == 1 ? D : elements) * size_of(dtype));
  };
  return {pitch(S, stride.row), pitch(heads, stride.head), pitch(B, stride.batch)};
}

// True if the TMA can copy from a tensor [B, heads, S, D] whose D elements are neighbours (CUDA driver API,
// cuTensorMapEncodeTiled).
inline bool heads_mappable(const void* tensor, Dtype dtype, int64_t B, int64_t heads, int64_t S, int64_t D,
                           HeadStrides stride) {
  if (reinterpret_cast<uintptr_t>(tensor) % 16 != 0 || D * size_of(dtype) % 16 != 0) return false;
  for (const int64_t size : {B, heads, S, D}) {
    if (size < 1 || size >= LARGEST_LENGTH) return false;
  }
  for (const cuuint64_t pitch : head_pitches(dtype, B, heads, S, D, stride)) {
    if (pitch % 16 != 0 || pitch >= cuuint64_t{1} << 40) return false;
  }
  return true;
}

// A tensor map of a tensor [B, heads, S, D], copied in boxes of `box_rows` (at most 256) rows of 128 bytes of
// one head; within every eight rows the 16-byte pieces are swizzled. What a box holds beyond S or D is zero.
// `name` is what an error calls the tensor. Throws std::runtime_error if it is not mappable.
inline CUtensorMap tensor_map_4d(const char* name, const void* tensor, Dtype dtype, int64_t B, int64_t heads,
                                 int64_t S, int64_t D, HeadStrides stride, int box_rows) {
  static const auto encode = find_encoder();
  const std::string is = std::string(name) + " is " + std::to_string(B) + " x " + std::to_string(heads) +
                         " x " + std::to_string(S) + " x " + std::to_string(D) + " with strides " +
                         std::to_string(stride.batch) + ", " + std::to_string(stride.head) + " and " +
                         std::to_string(stride.row);
  if (!heads_mappable(tensor, dtype, B, heads, S, D, stride)) {
    throw std::runtime_error(is + " and starts " + std::to_string(reinterpret_cast<uintptr_t>(tensor) % 16) +
                             " bytes past a multiple of 16; this step takes strides and D that are multiples "
                             "of 8 elements, sizes from 1 to below " +
                             std::to_string(LARGEST_LENGTH) +
                             " and a start at a multiple of 16 bytes: repack it by contiguous(), or take an "
                             "earlier step");
  }
  const CUtensorMapDataType type =
      dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(D), static_cast<cuuint64_t>(S),
                             static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(B)};
  const auto pitches = head_pitches(dtype, B, heads, S, D, stride);
  const cuuint32_t box[] = {static_cast<cuuint32_t>(BOX_ROW_BYTES / size_of(dtype)),
                            static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t step[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult error = encode(&map, type, 4, const_cast<void*>(tensor), size, pitches.data(), box, step,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled refused a tensor: " + is + " (error " +
                             std::to_string(error) + ")");
  }
  return map;
}
