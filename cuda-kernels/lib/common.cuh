// What several steps share, or ladders to come will, and none of them is about.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "step.h"

// Throws std::runtime_error, which reaches Python as RuntimeError, with the place and CUDA's own words.
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

inline void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // is told here, and not again after the next launch
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call +
                           " failed: " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

// Multiprocessors of the current device. A look-up of tens of nanoseconds, so launchers ask on every call.
inline int multiprocessor_count() {
  int device = 0;
  int count = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Bytes of shared memory that a block of the current device can have.
inline int most_shared_memory() {
  int device = 0;
  int most = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return most;
}

// Lets a kernel be launched with that much dynamic shared memory. More than 48 KiB must be asked for, and
// GPUs differ in how much they have. `bytes` must always be the same for a kernel, the most that it needs: a
// call that asks for fewer takes them from a thread that has asked and not yet launched. So a thread asks
// once for a kernel and a GPU: the driver takes a good part of a launch's time to set it.
template <typename Kernel>
static void allow_shared_memory(Kernel kernel, int bytes) {
  thread_local std::set<std::pair<const void*, int>> allowed;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  const auto key = std::pair(reinterpret_cast<const void*>(kernel), device);
  if (allowed.contains(key)) return;
  if (const int most = most_shared_memory(); bytes > most) {
    throw std::runtime_error("this step needs " + std::to_string(bytes) +
                             " bytes of shared memory a block, this GPU has " + std::to_string(most) +
                             ": take an earlier step");
  }
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  allowed.insert(key);
}

// Launches a kernel whose rows are read once, with as little L1 as there can be: shared memory has the rest
// of what an SM divides between them, used or not. What else it reads by way of L1 must be little.
template <typename Kernel, typename... Arguments>
void launch_with_small_l1(int64_t blocks, int64_t threads, cudaStream_t stream, Kernel* kernel,
                          Arguments... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  attribute.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

__host__ __device__ constexpr int64_t cdiv(int64_t dividend, int64_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

// For launchers that give a row to every block: calls launch(first row, rows) for as many rows as a grid may
// have blocks, and again where there are more.
template <typename Launch>
void launch_rows(int64_t rows, Launch launch) {
  constexpr int64_t MOST = int64_t{1} << 30;  // of the 2^31 - 1 that CUDA allows
  for (int64_t first = 0; first < rows; first += MOST) launch(first, std::min(rows - first, MOST));
}

// Calls function(T{}) with the C++ type that the dtype stands for.
template <typename Function>
void dispatch(Dtype dtype, Function function) {
  switch (dtype) {
    case Dtype::fp32:
      return function(float{});
    case Dtype::bf16:
      return function(__nv_bfloat16{});
    case Dtype::fp16:
      return function(__half{});
  }
}

// Conversions by name, because torch's build flags switch the implicit ones off.
__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__half value) { return __half2float(value); }

template <typename T>
__device__ T from_float(float value);  // rounds to nearest even
template <>
__device__ inline float from_float(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half from_float(float value) {
  return __float2half_rn(value);
}

// 16 bytes of neighbouring elements, as much as one instruction of one thread moves. Kept as four words,
// since the compiler copies an array of small elements one by one.
template <typename T>
struct Pack {
  static constexpr int SIZE = 16 / sizeof(T);
  uint4 words;

  __device__ T operator[](int i) const { return reinterpret_cast<const T*>(&words)[i]; }
};

// By value, so that an operand in memory is fetched whole, by one access.
template <typename T>
__device__ Pack<T> operator+(Pack<T> a, Pack<T> b) {
  Pack<T> sum;
#pragma unroll
  for (int i = 0; i < Pack<T>::SIZE; ++i) {
    reinterpret_cast<T*>(&sum.words)[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
  }
  return sum;
}

template <typename... Pointers>
bool aligned_to_16_bytes(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// The warp's sum, in lane 0. All 32 lanes must take part.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffff, value, distance);
  return value;
}

// A generic pointer into shared memory as PTX takes it.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
