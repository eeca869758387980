// Probe kernels that measure what a GPU can do at most: the denominators of every percentage in the project.
//
// A probe is called through the extension as `_C.probe(name, buffer, iterations)`. The buffer starts with
// RESULT_BYTES for one double a warp; its data follow. Every reading or computing probe reports there how
// often it used each value, in a form that a test can check: over data that are all ones, the results add up
// to
//   dram_read, l2_read, shared_read   the number of 32-bit words loaded    = bytes / 4
//   fma_fp32, mma_bf16, wgmma_bf16    the number of multiply-adds performed = FLOP / 2
// so that the counts below are measured facts, and so that no load or multiply-add is dead code.
//
// Work of one call, with data = bytes - RESULT_BYTES and sms = the device's multiprocessors:
//   dram_read, dram_write, l2_read    data * iterations bytes
//   dram_copy                         data * iterations bytes (one half is read, the other written)
//   shared_read                       sms * SHARED_READ_BYTES_PER_SM * iterations bytes
//   fma_fp32                          sms * FMA_FP32_FLOP_PER_SM * iterations FLOP
//   mma_bf16                          sms * MMA_BF16_FLOP_PER_SM * iterations FLOP
//   wgmma_bf16                        sms * WGMMA_BF16_FLOP_PER_SM * iterations FLOP
//   empty                             `iterations` launches
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "lib/step.h"

struct ProbeArgs {
  void* buffer;        // 16-byte aligned; RESULT_BYTES of results, then the data
  int64_t bytes;       // of the whole buffer
  int64_t iterations;  // passes over the data, turns of the inner loop, or launches
  cudaStream_t stream;
};

constexpr int64_t RESULT_BYTES = 1 << 20;
constexpr int64_t DATA_MULTIPLE = 64 << 10;  // the data are cut into whole tiles, two at a time for the copy
constexpr int64_t DATA_MINIMUM = 256 << 10;  // the operands of the computing probes

constexpr int64_t SHARED_READ_BYTES_PER_SM = 262144;
constexpr int64_t FMA_FP32_FLOP_PER_SM = 1048576;
constexpr int64_t MMA_BF16_FLOP_PER_SM = 4194304;
constexpr int64_t WGMMA_BF16_FLOP_PER_SM = 16777216;

extern const StepTable<ProbeArgs> probe_steps;
