// Launching kernels whose blocks form clusters.
#pragma once

#include <map>
#include <mutex>
#include <tuple>

#include "common.cuh"

constexpr int MOST_CLUSTER_BLOCKS = 16;  // more than 8 are not portable

// A launch of clusters of `blocks` blocks; with one block each, operator() launches blocks that any GPU runs.
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

  // How many clusters run at once; 0 where the GPU has no room for one. Asked once for a kernel, its shape
  // and a GPU: the answer takes longer than a launch.
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

  // The same with a row of the grid's for every cluster, blockIdx.x, and its blocks blockIdx.y: a block knows
  // its cluster at once, where blockIdx.x / blocks is 40 instructions before the first address.
  template <typename Kernel, typename... Arguments>
  void by_rows(int clusters, Kernel* kernel, Arguments... arguments) {
    attribute_.val.clusterDim = {1, static_cast<unsigned>(blocks_), 1};
    config_.gridDim = {static_cast<unsigned>(clusters), static_cast<unsigned>(blocks_), 1};
    config_.numAttrs = 1;  // for one block, too, whose kernel arrives at the cluster's barrier like any other
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
    cudaGetLastError();  // an error is an answer
    return error == cudaSuccess ? clusters : 0;
  }

  const void* kernel_;
  int blocks_;
  cudaLaunchAttribute attribute_ = {};
  cudaLaunchConfig_t config_ = {};
};
