// Tiles of a head's rows in shared memory, in panels of 64 columns.
#pragma once

#include "ptx/hopper.cuh"

constexpr int WARPGROUP = 128;  // threads
constexpr int ROW_BYTES = 128;  // 64 elements, as wide as the swizzle

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One thread asks for a tile of one head's rows: panels of 64 columns, BYTES each.
template <int PANELS, int BYTES>
__device__ inline void fetch(uint8_t (&tile)[PANELS][BYTES], const CUtensorMap* map, int row, int head,
                             int batch, uint64_t* full) {
  mbarrier_arrive_expect_tx(full, PANELS * BYTES);
#pragma unroll
  for (int i = 0; i < PANELS; ++i) tma_load(tile[i], map, i * 64, row, head, batch, full);
}

// A warpgroup, by its number among those that compute, flips the signs of its 64 rows of q.
template <int PANELS, int BYTES>
__device__ inline void negate(uint8_t (&q)[PANELS][BYTES], int number) {
#pragma unroll 1
  for (int i = 0; i < PANELS; ++i) {
    uint32_t* words = reinterpret_cast<uint32_t*>(q[i] + number * 64 * ROW_BYTES);
#pragma unroll 1
    for (int j = threadIdx.x % WARPGROUP; j < 64 * ROW_BYTES / 4; j += WARPGROUP) words[j] ^= 0x80008000;
  }
  fence_proxy_async();                        // shows them to wgmma
  named_barrier_sync(1 + number, WARPGROUP);  // for all threads' words
}

// A warpgroup, by its number among those that compute, turns a tile's rows from `rows` on into zeros. Behind
// a sequence's last row lie the next sequence's, or a padding: a NaN there times 0 would be NaN. Each
// warpgroup that reads the tile does so, and waits for no other: these write zeros as well.
template <int PANELS, int BYTES>
__device__ inline void clear_rows(uint8_t (&tile)[PANELS][BYTES], int rows, int number) {
  constexpr int PIECES = ROW_BYTES / 16;
  const int count = (BYTES / ROW_BYTES - rows) * PIECES;
#pragma unroll 1
  for (int i = threadIdx.x % WARPGROUP; i < count * PANELS; i += WARPGROUP)
    reinterpret_cast<uint4*>(tile[i / count])[rows * PIECES + i % count] = {};
  fence_proxy_async();                        // shows them to wgmma
  named_barrier_sync(1 + number, WARPGROUP);  // for all threads' zeros
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
