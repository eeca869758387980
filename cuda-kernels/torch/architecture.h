// Architectures: which ones this build has code for, and whether a GPU can run a step of it.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#ifndef KERNEL_TWINS_ARCHS
#error "KERNEL_TWINS_ARCHS must name the architectures that the .cu files are compiled for, such as 8.0;9.0a"
#endif

namespace kernel_twins {

// One entry of an architecture list, such as "9.0a" or "8.0+PTX"; the capability 9.0 is {9, 0}.
struct Architecture {
  std::pair<int, int> capability;
  bool exact = false;  // 9.0a: architecture-specific code, which no other GPU runs
  bool ptx = false;    // the driver can compile it for any later architecture
};

inline Architecture parse_architecture(const std::string& text) {
  char* rest = nullptr;
  const int major = std::strtol(text.c_str(), &rest, 10);
  const int minor = *rest == '.' ? std::strtol(rest + 1, &rest, 10) : 0;
  return {{major, minor}, *rest == 'a', text.find("+PTX") != std::string::npos};
}

// Parses a list in the form of TORCH_CUDA_ARCH_LIST.
inline std::vector<Architecture> parse_architectures(std::string list) {
  std::replace(list.begin(), list.end(), ';', ' ');
  std::istringstream words(list);
  std::vector<Architecture> architectures;
  for (std::string word; words >> word;) architectures.push_back(parse_architecture(word));
  return architectures;
}

// The architectures of this build.
inline const std::vector<Architecture>& built_architectures() {
  static const std::vector<Architecture> built = parse_architectures(KERNEL_TWINS_ARCHS);
  return built;
}

// True if a GPU runs code built for an architecture: binaries of the GPU's generation up to its own number,
// or any earlier PTX.
inline bool runs(const Architecture& built, std::pair<int, int> gpu) {
  if (built.exact) return built.capability == gpu;
  const bool same_generation = built.capability.first == gpu.first;
  return (same_generation || built.ptx) && built.capability <= gpu;
}

// True if code for an architecture meets a step's requirement (">=9.0", "==9.0a").
inline bool satisfies(const std::string& arch, const Architecture& given) {
  const Architecture needed = parse_architecture(arch.substr(2));
  if (arch.substr(0, 2) == "==") return given.capability == needed.capability && given.exact == needed.exact;
  return given.capability >= needed.capability;
}

// True if a GPU runs a step with that requirement, compiled for those architectures.
inline bool runs_step(const std::string& arch, std::pair<int, int> gpu,
                      const std::vector<Architecture>& architectures) {
  // The driver loads the newest code that the GPU runs, so that code must meet the requirement.
  const Architecture* chosen = nullptr;
  for (const Architecture& built : architectures) {
    if (!runs(built, gpu)) continue;
    if (!chosen || std::pair(built.capability, built.exact) > std::pair(chosen->capability, chosen->exact)) {
      chosen = &built;
    }
  }
  return chosen && satisfies(arch, *chosen);
}

// The reason why this GPU cannot run a step: the GPU, or this build, lacks the instructions. Empty if it can.
inline std::string architecture_refusal(const std::string& op, const std::string& step,
                                        const std::string& arch, int device) {
  int major = 0;
  int minor = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  const std::pair<int, int> gpu = {major, minor};
  if (runs_step(arch, gpu, built_architectures())) return "";
  const std::string has = std::to_string(major) + "." + std::to_string(minor);
  const bool exact = arch.back() == 'a';
  if (!satisfies(arch, {gpu, exact})) {
    return op + " " + step + " needs compute capability " + arch + ", this GPU has " + has;
  }
  return op + " " + step + " was not built for this GPU's compute capability " + has + " but for " +
         KERNEL_TWINS_ARCHS + ": build again with TORCH_CUDA_ARCH_LIST=" + has + (exact ? "a" : "");
}

}  // namespace kernel_twins
