// Helpers of all CUDA kernels: error checks, launch limits, dtype dispatch and conversions, 16-byte packs.
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

// Throws std::runtime_error (RuntimeError in Python) with file, line, call and CUDA's message.
#define CUDA_CHECK(call) cuda_check((call), #call, __FILE__, __LINE__)

inline void cuda_check(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that the next launch does not report it again
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call +
                           " failed: " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

// SMs of the current device. The query takes tens of nanoseconds, so launchers repeat it on every call.
inline int multiprocessor_count() {
  int device = 0;
  int count = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Most shared memory that a block may opt in to on the current device, in bytes.
inline int most_shared_memory() {
  int device = 0;
  int most = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return most;
}

// Allows a kernel `bytes` of dynamic shared memory, since more than 48 KiB needs an opt-in. Throws if the GPU
// has less. Pass the same value, the kernel's largest need, on every call: the attribute is shared by all
// threads, and a smaller value set by one would fail the launch of another. Each thread sets it once a kernel
// and GPU, as the driver call costs a good part of a launch.
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

// Launches a kernel with the largest shared memory carveout, which leaves the smallest L1. For kernels that
// read their rows once and little else through L1.
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

// The smallest power of two that is at least `number`.
inline int64_t power_of_two_from(int64_t number) {
  int64_t power = 1;
  while (power < number) power *= 2;
  return power;
}

// Calls launch(first row, rows) once, or several times if there are more rows than a grid may have blocks.
// For launchers that give each row a block.
template <typename Launch>
void launch_rows(int64_t rows, Launch launch) {
  constexpr int64_t MOST = int64_t{1} << 30;  // blocks a launch; CUDA allows 2^31 - 1
  for (int64_t first = 0; first < rows; first += MOST) launch(first, std::min(rows - first, MOST));
}

// Calls function(T{}) with the C++ type of the dtype.
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

// Named conversions: torch's build flags disable the implicit ones.
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

// 16 bytes of neighbouring elements, the widest access of a thread. Stored as four words, because the
// compiler copies an array of small elements one by one.
template <typename T>
struct Pack {
  static constexpr int SIZE = 16 / sizeof(T);
  uint4 words;

  __device__ T operator[](int i) const { return reinterpret_cast<const T*>(&words)[i]; }
};

// Operands are passed by value, so that one in memory is fetched by one 16-byte access.
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

// Sum over the warp, valid in lane 0. All 32 lanes must call.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffff, value, distance);
  return value;
}

// The 32-bit shared-memory address that PTX instructions take, from a generic pointer.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
