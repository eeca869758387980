// Tensor maps: descriptions of matrices for the TMA. Host code. A map is encoded on every call and passed to
// the kernel by value, so that none can be stale.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "step.h"

// Exclusive limit of sizes: coordinates are 32-bit integers, and the last tile may reach past the edge.
constexpr int64_t LARGEST_SIZE = (int64_t{1} << 31) - 1024;

// Bytes of a box's row: the width that the 128-byte swizzle permutes.
constexpr int BOX_ROW_BYTES = 128;

constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// True if the TMA can copy from or to a row-major matrix with rows `pitch` elements apart (CUDA driver API,
// cuTensorMapEncodeTiled).
inline bool mappable(const void* matrix, Dtype dtype, int64_t rows, int64_t cols, int64_t pitch) {
  const int64_t pitch_bytes = pitch * size_of(dtype);
  return reinterpret_cast<uintptr_t>(matrix) % 16 == 0 && pitch_bytes % 16 == 0 && pitch >= cols &&
         pitch_bytes < int64_t{1} << 40 && rows > 0 && cols > 0 && rows < LARGEST_SIZE && cols < LARGEST_SIZE;
}

// The driver's cuTensorMapEncodeTiled, looked up at run time: linking to libcuda would fail on a build
// machine without a driver.
inline auto find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                             cudaEnableDefault, &result);
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears the error, so that the next launch does not report it again
    throw std::runtime_error(std::string("cudaGetDriverEntryPointByVersion failed: ") +
                             cudaGetErrorString(error));
  }
  if (result != cudaDriverEntryPointSuccess) {
    throw std::runtime_error("the driver has no cuTensorMapEncodeTiled: install driver 525 or newer");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// A tensor map of a row-major matrix [rows, cols], copied in boxes of `box_rows` (at most 256) rows of 128
// bytes; within every eight rows the 16-byte pieces are swizzled. Rows of `box_cols` elements, if that is
// given, are narrower and not swizzled. Throws std::runtime_error if the matrix is not mappable.
inline CUtensorMap tensor_map(const void* matrix, Dtype dtype, int64_t rows, int64_t cols, int64_t pitch,
                              int box_rows, int box_cols = 0) {
  static const auto encode = find_encoder();
  const CUtensorMapDataType type = dtype == Dtype::fp32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch_bytes[] = {static_cast<cuuint64_t>(pitch * size_of(dtype))};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_cols > 0 ? box_cols : BOX_ROW_BYTES / size_of(dtype)),
                            static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t step[] = {1, 1};
  CUtensorMap map;
  // L2 promotion fetches 128 bytes at a time. With 256, rows that begin in the middle of 256 bytes would be
  // fetched twice.
  const CUresult error = encode(&map, type, 2, const_cast<void*>(matrix), size, pitch_bytes, box, step,
                                CU_TENSOR_MAP_INTERLEAVE_NONE,
                                box_cols > 0 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled refused a matrix of " + std::to_string(rows) + " x " +
                             std::to_string(cols) + " elements, rows " + std::to_string(pitch) +
                             " apart (error " + std::to_string(error) + ")");
  }
  return map;
}
