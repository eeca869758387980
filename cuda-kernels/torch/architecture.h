// Which architectures this build is for, and whether a GPU runs a step of it.
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

// "9.0a" or "8.0+PTX"; 9.0 is {9, 0}.
struct Architecture {
  std::pair<int, int> capability;
  bool exact = false;  // 9.0a: features of that one architecture, and no other runs it
  bool ptx = false;    // the driver compiles it for any later one
};

inline Architecture parse_architecture(const std::string& text) {
  char* rest = nullptr;
  const int major = std::strtol(text.c_str(), &rest, 10);
  const int minor = *rest == '.' ? std::strtol(rest + 1, &rest, 10) : 0;
  return {{major, minor}, *rest == 'a', text.find("+PTX") != std::string::npos};
}

// Those of a list that is spelled like TORCH_CUDA_ARCH_LIST.
inline std::vector<Architecture> parse_architectures(std::string list) {
  std::replace(list.begin(), list.end(), ';', ' ');
  std::istringstream words(list);
  std::vector<Architecture> architectures;
  for (std::string word; words >> word;) architectures.push_back(parse_architecture(word));
  return architectures;
}

// What this build is for.
inline const std::vector<Architecture>& built_architectures() {
  static const std::vector<Architecture> built = parse_architectures(KERNEL_TWINS_ARCHS);
  return built;
}

// Whether a GPU runs code built for an architecture: code for its generation up to its own number, or any
// PTX.
inline bool runs(const Architecture& built, std::pair<int, int> gpu) {
  if (built.exact) return built.capability == gpu;
  const bool same_generation = built.capability.first == gpu.first;
  return (same_generation || built.ptx) && built.capability <= gpu;
}

// Whether code for that architecture is what a step's arch (">=9.0", "==9.0a") asks for.
inline bool satisfies(const std::string& arch, const Architecture& given) {
  const Architecture needed = parse_architecture(arch.substr(2));
  if (arch.substr(0, 2) == "==") return given.capability == needed.capability && given.exact == needed.exact;
  return given.capability >= needed.capability;
}

// Whether a GPU runs a step of that arch that was compiled for those architectures.
inline bool runs_step(const std::string& arch, std::pair<int, int> gpu,
                      const std::vector<Architecture>& architectures) {
  // The driver takes the newest of what runs, so that is the code which must be able to do the step.
  const Architecture* chosen = nullptr;
  for (const Architecture& built : architectures) {
    if (!runs(built, gpu)) continue;
    if (!chosen || std::pair(built.capability, built.exact) > std::pair(chosen->capability, chosen->exact)) {
      chosen = &built;
    }
  }
  return chosen && satisfies(arch, *chosen);
}

// Why this GPU runs a step not: it lacks the instructions, or this build does. Empty where it runs it.
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
