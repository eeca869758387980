// The cycles that a product should take in rounds of v15's and v19's tiles, and what a model knows of a GPU
// and of a product. Host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lib/common.cuh"
#include "tile.cuh"

// What the model knows of a GPU.
struct GpuRates {
  int sms;
  double dram_bytes_a_cycle;
};

inline GpuRates gpu_rates() {
  constexpr double SUSTAINED = 0.89;  // of the boost clock, while tensor cores work
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device));
    return value;
  };
  thread_local int known = -1;
  thread_local GpuRates rates = {};
  if (known != device) {
    const double bytes =
        2.0 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
    rates = {attribute(cudaDevAttrMultiProcessorCount),
             bytes / (SUSTAINED * attribute(cudaDevAttrClockRate))};
    known = device;
  }
  return rates;
}

// A product as the model sees it.
struct FewRowsProduct {
  int64_t M, N, K;
  int64_t a_pitch, b_pitch;   // elements between the operand's lines
  bool a_along_k, b_along_k;  // they run along K
};

// Whether lines begin at multiples of 128 bytes.
inline bool in_whole_lines(int64_t pitch) { return pitch % 64 == 0; }

inline double dram_cycles(const GpuRates& gpu, const FewRowsProduct& product) {
  return 2.0 * (product.M + product.N) * product.K / gpu.dram_bytes_a_cycle;
}

// The cycles of a kernel whose SMs and device memory work at the same time; of the shorter one a share shows.
inline double overlapped(double launch, double hidden, double inside, double dram) {
  return launch + std::max(inside, dram) + hidden * std::min(inside, dram);
}

// The blocks of a cluster, one below the other, of block_m x block_n sums each.
struct ClusterTile {
  int block_m, block_n, cluster;
};

// How much more lines cost that do not begin at multiples of 128 bytes, and those that do not begin at
// multiples of 32, the sectors that L2 delivers.
struct UnalignedCost {
  double sectors, halves;

  double of(int64_t pitch) const { return in_whole_lines(pitch) ? 1.0 : pitch % 16 == 0 ? sectors : halves; }
};

// A model's constants, in cycles.
struct RoundsModel {
  double launch;            // until a kernel computes, and after its last tile
  double cluster;           // more, until a cluster's blocks have met
  double lines;             // of 128 bytes, that L2 delivers to all SMs in a cycle
  UnalignedCost unaligned;  // lines of L2 behind one
  double sm_bytes;          // that an SM takes in a cycle
  UnalignedCost sm_unaligned;
  double least;        // of a block of K, however small the tile
  double rows_64;      // products of a tile with one warpgroup of rows take so much longer
  double hidden;       // this share of the shorter of two overlapping times shows
  double sums;         // to store 1024 sums of a block
  double joined;       // until the last block of a split tile knows that it is the last
  double sums_joined;  // to write or to read 1024 sums of a split
};

// The cycles of full rounds of all SMs, and of the tiles that are left over, each split into `splits` along
// K.
inline double rounds_cycles(const RoundsModel& model, const GpuRates& gpu, const FewRowsProduct& product,
                            const ClusterTile& tile, int splits) {
  const auto [block_m, block_n, cluster] = tile;
  const int64_t k_blocks = cdiv(product.K, BLOCK_K);
  const int64_t most = gpu.sms / cluster;
  const int64_t tiles = cdiv(product.M, block_m * cluster) * cdiv(product.N, block_n);
  const double a_rows = std::min<int64_t>(block_m, product.M);
  const double b_cols = std::min<int64_t>(block_n, product.N);
  const double a_lines = a_rows * model.unaligned.of(product.a_pitch);
  const double b_lines = b_cols * model.unaligned.of(product.b_pitch);
  const double sm_lines =
      a_rows * model.sm_unaligned.of(product.a_pitch) + b_cols * model.sm_unaligned.of(product.b_pitch);
  const double products = block_m * block_n / 32.0 * (block_m == 64 ? model.rows_64 : 1.0);
  const double sums = block_m * block_n / 1024.0;
  const auto round = [&](int64_t clusters, int64_t steps) {
    return steps * std::max({products, clusters * (a_lines * tile.cluster + b_lines) / model.lines,
                             sm_lines * 128 / model.sm_bytes, model.least}) +
           sums * model.sums;
  };
  const int64_t left = tiles % most;
  double inside = tiles / most * round(most, k_blocks);
  if (left > 0) inside += round(left * splits, cdiv(k_blocks, splits));
  if (splits > 1) inside += model.joined + (1 + splits) * sums * model.sums_joined;
  const double launch = model.launch + (cluster > 1 ? model.cluster : 0);
  return overlapped(launch, model.hidden, inside, dram_cycles(gpu, product));
}
