// Programmatic dependent launch, for the later launches of a step that has several.
#pragma once

#include "common.cuh"

// Launches kernel(arguments...) so that it is set up while the kernel before it ends. That one must call
// allow_dependent_launch, and this one wait_for_previous_kernel.
template <typename Kernel, typename... Arguments>
void launch_early(dim3 grid, int64_t threads, cudaStream_t stream, Kernel* kernel, Arguments... arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = static_cast<unsigned>(threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}
