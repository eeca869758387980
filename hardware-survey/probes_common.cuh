// Shared by the probes: the two parts of the buffer, and how a kernel reports.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "lib/common.cuh"
#include "probes.h"

struct Data {
  uint4* vectors;
  int64_t bytes;
};

inline double* results_of(const ProbeArgs& args) { return static_cast<double*>(args.buffer); }

// The part of the buffer behind the results; throws where it is too small or not a whole number of tiles.
inline Data data_of(const ProbeArgs& args) {
  const int64_t bytes = args.bytes - RESULT_BYTES;
  if (bytes < DATA_MINIMUM || bytes % DATA_MULTIPLE != 0) {
    throw std::runtime_error("buffer has " + std::to_string(args.bytes) + " bytes, must have " +
                             std::to_string(RESULT_BYTES) + " for results plus a multiple of " +
                             std::to_string(DATA_MULTIPLE) + ", at least " + std::to_string(DATA_MINIMUM) +
                             ", of data");
  }
  return {reinterpret_cast<uint4*>(static_cast<char*>(args.buffer) + RESULT_BYTES), bytes};
}

// Adds up the values of a warp's threads and leaves the sum in the warp's own result.
__device__ inline void report(double* results, double value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) results[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = value;
}
