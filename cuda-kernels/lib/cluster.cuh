// Launches of kernels whose blocks form clusters.
#pragma once

#include <map>
#include <mutex>
#include <tuple>

#include "common.cuh"

constexpr int MOST_CLUSTER_BLOCKS = 16;  // more than 8 need an opt-in, and not every GPU allows them

// A launch of clusters of `blocks` blocks each. With blocks == 1, operator() sets no cluster attribute, so
// any GPU can run it.
class ClusterLaunch {
 public:
  ClusterLaunch(const void* kernel, int blocks, int threads, int shared_bytes, cudaStream_t stream)
      : kernel_(kernel), blocks_(blocks) {
    attribute_.id = cudaLaunchAttributeClusterDimension;
    attribute_.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    config_.gridDim = static_cast<unsigned>(blocks);
    config_.blockDim = static_cast<unsigned>(threads);
    config_.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config_.stream = stream;
    config_.attrs = &attribute_;
    config_.numAttrs = blocks > 1 ? 1 : 0;
  }

  // The number of clusters that can be resident; 0 if the GPU has no room for one. The answer is cached by
  // kernel, shape and GPU, since the query takes longer than a launch.
  int resident() {
    static std::mutex mutex;
    static std::map<std::tuple<const void*, int, unsigned, size_t, int>, int> known;
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    const std::lock_guard lock(mutex);
    const auto key = std::tuple(kernel_, blocks_, config_.blockDim.x, config_.dynamicSmemBytes, device);
    const auto place = known.find(key);
    return place != known.end() ? place->second : known[key] = ask();
  }

  template <typename Kernel, typename... Arguments>
  void operator()(int clusters, Kernel* kernel, Arguments... arguments) {
    config_.gridDim = static_cast<unsigned>(clusters * blocks_);
    CUDA_CHECK(cudaLaunchKernelEx(&config_, kernel, arguments...));
  }

  // The same with a two-dimensional grid: blockIdx.x is the cluster, blockIdx.y the block in it. A kernel
  // then needs no division of blockIdx.x by a run-time number, which is some 40 instructions before the first
  // address.
  template <typename Kernel, typename... Arguments>
  void by_rows(int clusters, Kernel* kernel, Arguments... arguments) {
    attribute_.val.clusterDim = {1, static_cast<unsigned>(blocks_), 1};
    config_.gridDim = {static_cast<unsigned>(clusters), static_cast<unsigned>(blocks_), 1};
    config_.numAttrs = 1;  // also for one block: its kernel arrives at the cluster's barrier, too
    CUDA_CHECK(cudaLaunchKernelEx(&config_, kernel, arguments...));
  }

 private:
  int ask() {
    int clusters = 0;
    if (blocks_ == 1) {
      CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &clusters, kernel_, static_cast<int>(config_.blockDim.x), config_.dynamicSmemBytes));
      return clusters * multiprocessor_count();
    }
    if (blocks_ > 8) {
      CUDA_CHECK(cudaFuncSetAttribute(kernel_, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
    config_.gridDim = static_cast<unsigned>(blocks_);
    const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, kernel_, &config_);
    cudaGetLastError();  // clears the error: it means "no room"
    return error == cudaSuccess ? clusters : 0;
  }

  const void* kernel_;
  int blocks_;
  cudaLaunchAttribute attribute_ = {};
  cudaLaunchConfig_t config_ = {};
};
