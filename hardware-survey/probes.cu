// The table of probes, and the probe that does nothing. See probes.h for what one call of each does.
#include "probes.h"

#include <iterator>

#include "lib/common.cuh"
#include "probes_compute.cuh"
#include "probes_memory.cuh"

namespace {

__global__ void probe_empty_kernel() {}

// Launches a kernel without work, `iterations` times: what a launch costs.
void probe_empty(const ProbeArgs& args) {
  for (int64_t launch = 0; launch < args.iterations; ++launch)
    probe_empty_kernel<<<1, 32, 0, args.stream>>>();
  CUDA_CHECK(cudaGetLastError());
}

constexpr Step<ProbeArgs> PROBES[] = {
    {"dram_read", memory_probe::probe_read, ">=8.0"},
    {"dram_write", memory_probe::probe_dram_write, ">=8.0"},
    {"dram_copy", memory_probe::probe_dram_copy, ">=8.0"},
    {"l2_read", memory_probe::probe_read, ">=8.0"},
    {"shared_read", memory_probe::probe_shared_read, ">=8.0"},
    {"fma_fp32", compute_probe::probe_fma_fp32, ">=8.0"},
    {"mma_bf16", compute_probe::probe_mma_bf16, ">=8.0"},
    {"wgmma_bf16", compute_probe::probe_wgmma_bf16, "==9.0a"},
    {"empty", probe_empty, ">=8.0"},
};

}  // namespace

const StepTable<ProbeArgs> probe_steps{std::begin(PROBES), std::end(PROBES)};
