// Probes of the memory system: device memory, L2, shared memory. See probes.h for what one call does.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "probes_common.cuh"

namespace memory_probe {

constexpr int THREADS = 256;
// All blocks are resident, and few enough that each reads a tile of its own also where the data fit into L2:
// two SMs that ask for one line at the same time may be served as one.
constexpr int BLOCKS_PER_SM = 4;
constexpr int UNROLL = 8;                       // 16-byte accesses a thread has under way: 128 KiB per SM
constexpr int TILE_VECTORS = THREADS * UNROLL;  // one block's share of the data at a time
constexpr int64_t TILE_BYTES = TILE_VECTORS * 16;
static_assert(DATA_MULTIPLE % TILE_BYTES == 0, "the data are whole tiles");

// Deals the tiles of every pass out to the blocks in turn. Passes follow without a break, so that no block
// idles at the end of one, and every pass deals anew, so that another SM reads the tile each time.
template <typename Body>
__device__ void for_each_tile(int64_t tiles, int64_t passes, Body body) {
  const int64_t step = gridDim.x % tiles;
  int64_t tile = blockIdx.x % tiles;
  for (int64_t turn = blockIdx.x; turn < tiles * passes; turn += gridDim.x) {
    body(tile);
    tile += step;
    if (tile >= tiles) tile -= tiles;
  }
}

// Cached in L2 only (.cg), so that L1 never answers; volatile, so that no load is merged, moved out of a loop
// or dropped.
__device__ inline uint4 load_past_l1(const uint4* source) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source));
  return value;
}

// Evict-first (.cs): nothing written here is read again.
__device__ inline void store_streaming(uint4* target, uint4 value) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ inline uint32_t sum_of_words(uint4 value) { return value.x + value.y + value.z + value.w; }

// Reads every 16-byte vector of the data once a pass. Over data well beyond L2 this is the device-memory read
// rate; over data that fit into L2, the L2 read rate. Every loaded word goes into a reported sum.
__global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void probe_read_kernel(const uint4* data, int64_t tiles,
                                                                            int64_t passes, double* results) {
  uint32_t sum = 0;
  for_each_tile(tiles, passes, [&](int64_t tile) {
    const uint4* source = data + tile * TILE_VECTORS + threadIdx.x;
    uint4 value[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) value[u] = load_past_l1(source + u * THREADS);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) sum += sum_of_words(value[u]);
  });
  report(results, sum);
}

// Writes every 16-byte vector of the data once a pass; 32-bit word i becomes i * 2654435761 (mod 2^32), which
// looks random on the wires. Stores have an effect, so none can be dropped.
__global__ __launch_bounds__(THREADS, BLOCKS_PER_SM) void probe_write_kernel(uint4* data, int64_t tiles,
                                                                             int64_t passes) {
  constexpr uint32_t MULTIPLIER = 2654435761u;
  for_each_tile(tiles, passes, [&](int64_t tile) {
    const int64_t first = tile * TILE_VECTORS + threadIdx.x;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int64_t vector = first + u * THREADS;
      const uint32_t word = static_cast<uint32_t>(vector) * 4 * MULTIPLIER;
      store_streaming(data + vector, {word, word + MULTIPLIER, word + 2 * MULTIPLIER, word + 3 * MULTIPLIER});
    }
  });
}

constexpr int COPY_THREADS = 1024;  // a block copies a vector a thread and ends
static_assert(DATA_MULTIPLE % (2 * COPY_THREADS * 16) == 0,
              "the copy cuts each half of the data into whole tiles");

// Copies the first half of the data onto the second once a pass. Unlike the other probes it has a block for
// every tile of every pass: reads and writes together are fastest where blocks are dealt out in order, and
// blocks that loop drift apart.
__global__ __launch_bounds__(COPY_THREADS) void probe_copy_kernel(const uint4* source, uint4* target,
                                                                  int64_t tiles) {
  const int64_t i = blockIdx.x % tiles * COPY_THREADS + threadIdx.x;
  store_streaming(target + i, load_past_l1(source + i));
}

// In the table twice, as dram_read and as l2_read: the size of the data makes the difference.
inline void probe_read(const ProbeArgs& args) {
  const Data data = data_of(args);
  probe_read_kernel<<<BLOCKS_PER_SM * multiprocessor_count(), THREADS, 0, args.stream>>>(
      data.vectors, data.bytes / TILE_BYTES, args.iterations, results_of(args));
  CUDA_CHECK(cudaGetLastError());
}

inline void probe_dram_write(const ProbeArgs& args) {
  const Data data = data_of(args);
  probe_write_kernel<<<BLOCKS_PER_SM * multiprocessor_count(), THREADS, 0, args.stream>>>(
      data.vectors, data.bytes / TILE_BYTES, args.iterations);
  CUDA_CHECK(cudaGetLastError());
}

inline void probe_dram_copy(const ProbeArgs& args) {
  const Data data = data_of(args);
  const int64_t tiles = data.bytes / 2 / (COPY_THREADS * 16);
  if (args.iterations == 0) return;
  probe_copy_kernel<<<tiles * args.iterations, COPY_THREADS, 0, args.stream>>>(
      data.vectors, data.vectors + tiles * COPY_THREADS, tiles);
  CUDA_CHECK(cudaGetLastError());
}

constexpr int SHARED_THREADS = 512;
constexpr int SHARED_BLOCKS_PER_SM = 2;
constexpr int SHARED_LOADS = 16;   // per thread and turn
constexpr int SHARED_STRIDE = 64;  // vectors between a thread's loads: whole multiples of a warp's 32
constexpr int SHARED_VECTORS = SHARED_THREADS + (SHARED_LOADS - 1) * SHARED_STRIDE;  // 23 KiB
static_assert(SHARED_READ_BYTES_PER_SM == int64_t{SHARED_BLOCKS_PER_SM} * SHARED_THREADS * SHARED_LOADS * 16);

// Reads shared memory in 16-byte vectors, neighbouring lanes neighbouring vectors: a warp's 512 bytes take
// the least possible four passes over the 32 banks. Volatile loads, all of them into a reported sum.
__global__ __launch_bounds__(SHARED_THREADS,
                             SHARED_BLOCKS_PER_SM) void probe_shared_read_kernel(const uint4* data,
                                                                                 int64_t turns,
                                                                                 double* results) {
  __shared__ uint4 tile[SHARED_VECTORS];
  for (int i = threadIdx.x; i < SHARED_VECTORS; i += SHARED_THREADS) tile[i] = data[i];
  __syncthreads();  // wait until every thread has filled its part of the tile

  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(tile + threadIdx.x));
  uint32_t sum = 0;
#pragma unroll 1
  for (int64_t turn = 0; turn < turns; ++turn) {
#pragma unroll
    for (int u = 0; u < SHARED_LOADS; ++u) {
      uint4 value;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                   : "r"(address + u * SHARED_STRIDE * 16));
      sum += sum_of_words(value);
    }
  }
  report(results, sum);
}

inline void probe_shared_read(const ProbeArgs& args) {
  const int blocks = SHARED_BLOCKS_PER_SM * multiprocessor_count();
  probe_shared_read_kernel<<<blocks, SHARED_THREADS, 0, args.stream>>>(data_of(args).vectors, args.iterations,
                                                                       results_of(args));
  CUDA_CHECK(cudaGetLastError());
}

}  // namespace memory_probe
