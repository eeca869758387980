// The kernel of matmul_bf16's v18 and of linear's v02: the operand with few lines gives a tile its columns,
// and the blocks of a cluster share a tile's K. Terms: docs/glossary.md.
#pragma once

#include "few_rows_choice.h"
#include "lib/ptx/hopper.cuh"
#include "lib/ptx/wgmma.cuh"
#include "lib/ptx/wgmma_narrow.cuh"
#include "tile.cuh"

// The kernel's argument, by value. Element (w, f) of the result is the product of the wide operand's line w
// and the other's line f. A tile's K is split between `clusters` * `blocks` blocks.
struct FewRowsProblem {
  CUtensorMap wide, few;
  void* out;  // [M, N], row-major
  int M, N;
  int few_tiles;  // tiles that share a tile's lines of the wide operand
  int k_blocks;
  int clusters, blocks;  // of a tile, and of a cluster
  bool transposed;       // the wide operand's lines are out's columns, else its rows
  bool out_fp32;         // else T
  // Four neighbours of out, from a multiple of 4 on, can be stored at once. A caller sets it to false if the
  // address of another matrix that its epilogue stores forbids it; launch_few_rows adds what out forbids.
  bool in_fours = true;
  float4* partials;    // [tiles, clusters, a tile's sums]; nullptr for one cluster
  unsigned* counters;  // [tiles, blocks], zero before and after
};

// Stores sums of out's `row` from `col` on.
template <typename Out>
__device__ inline void store_four(const FewRowsProblem& problem, void* matrix, const float (&sums)[4],
                                  int row, int col) {
  Out* to = static_cast<Out*>(matrix) + int64_t{row} * problem.N + col;
  struct alignas(4 * sizeof(Out)) Four {
    Out of[4];
  };
  Four four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.of[i] = from_float<Out>(sums[i]);
  if (problem.in_fours) {  // then N is a multiple of 4
    *reinterpret_cast<Four*>(to) = four;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i < problem.N) to[i] = four.of[i];
    }
  }
}

// The epilogue of a thread, which stores four columns of out from `col` on: what is done to their sums before
// the store. Here, nothing.
struct PlainFewRowsEpilogue {
  __device__ PlainFewRowsEpilogue(const FewRowsProblem&, int col) {}
  // `store(matrix)` rounds the sums and stores them as they are.
  template <typename Store>
  __device__ void apply(float (&sums)[4], Store store) {}
};

// BLOCK_WIDE x BLOCK_FEW sums a block.
template <typename T_, FewRowsShape SHAPE, bool WIDE_ALONG_K_, bool FEW_ALONG_K_>
struct FewRowsTile {
  using T = T_;
  using Problem = FewRowsProblem;
  using Epilogue = PlainFewRowsEpilogue;
  static constexpr int BLOCK_WIDE = SHAPE.wide;
  static constexpr int BLOCK_FEW = SHAPE.few;
  static constexpr bool WIDE_ALONG_K = WIDE_ALONG_K_;  // the operand's lines run along K, else across it
  static constexpr bool FEW_ALONG_K = FEW_ALONG_K_;
  static_assert(FEW_ALONG_K || BLOCK_FEW > 64, "few lines are repacked");

  static constexpr int CONSUMERS = BLOCK_WIDE / 64;  // warpgroups that multiply 64 of the wide lines each
  static constexpr int THREADS = CONSUMERS * WARPGROUP + 32;
  static constexpr int BLOCKS_PER_SM = few_rows_blocks_per_sm(SHAPE);
  static constexpr int SUMS = BLOCK_FEW / 2;  // of a thread
  static constexpr int STAGE_BYTES = (BLOCK_WIDE + BLOCK_FEW) * BLOCK_K * sizeof(T);
  static constexpr int RESERVED_BYTES = 1024;  // of each block, by CUDA
  static constexpr int STAGES = (SHARED_BYTES / BLOCKS_PER_SM - RESERVED_BYTES - 256) / STAGE_BYTES;

  struct Stages {
    T wide[STAGES][BLOCK_WIDE * BLOCK_K];  // [BLOCK_WIDE, BLOCK_K], or pieces [BLOCK_K, 64]
    T few[STAGES][BLOCK_FEW * BLOCK_K];    // likewise
  };
  struct Shared {
    union {
      Stages stages;
      float sums[sizeof(Stages) / sizeof(float)];  // the tile's, in out's order, see Rows
    };
    uint64_t full[STAGES];   // complete when a stage's tiles have come
    uint64_t empty[STAGES];  // complete when all consumers have read it
    bool last;               // this block's part of a share was the last one
  };
  static_assert((sizeof(Shared) + RESERVED_BYTES) * BLOCKS_PER_SM <= SHARED_BYTES + RESERVED_BYTES);

  // The tile as a part of out. A row's pitch keeps a warp's stores of its sums free of bank conflicts, but
  // for those of 8 columns.
  template <bool TRANSPOSED>
  struct Rows {
    static constexpr int ROWS = TRANSPOSED ? BLOCK_FEW : BLOCK_WIDE;
    static constexpr int COLS = TRANSPOSED ? BLOCK_WIDE : BLOCK_FEW;
    static constexpr int PITCH = COLS + (TRANSPOSED ? 4 : 8);
    static_assert(ROWS * PITCH * sizeof(float) <= sizeof(Stages));
  };
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// PTX ISA, "mapa". The address of the same place in the shared memory of another block of the cluster.
__device__ inline uint32_t address_in(const void* place, uint32_t block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(block));
  return there;
}

// PTX ISA, "ld", of .shared::cluster.
__device__ inline float4 load_shared(uint32_t address) {
  float4 four;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(address)
               : "memory");
  return four;
}

__device__ inline void add(float (&sums)[4], const float4& four) {
  sums[0] += four.x;
  sums[1] += four.y;
  sums[2] += four.z;
  sums[3] += four.w;
}

// Adds up the sums of a tile's blocks, always in the same order, and stores them. Each block does so for its
// share of the tile's rows; where a tile has several clusters, the last block to arrive of each share does.
template <typename Tile, bool TRANSPOSED>
__device__ inline void finish_tile(const typename Tile::Problem& problem, typename Tile::Shared& shared,
                                   int tile) {
  using T = typename Tile::T;
  using Rows = typename Tile::template Rows<TRANSPOSED>;
  constexpr int THREADS = Tile::CONSUMERS * WARPGROUP;
  constexpr int FOURS = Rows::COLS / 4;  // of a row, a thread each
  constexpr int STEP = THREADS / FOURS;  // rows at once
  constexpr int MOST_BLOCKS = 8;
  static_assert(THREADS % FOURS == 0);
  const int rank = cluster_block();
  const int four = threadIdx.x % FOURS;
  const int wide = tile / problem.few_tiles * Tile::BLOCK_WIDE;
  const int few = tile % problem.few_tiles * Tile::BLOCK_FEW;
  const int first_row = TRANSPOSED ? few : wide;
  const int col = (TRANSPOSED ? wide : few) + four * 4;
  const int begin = Rows::ROWS * rank / problem.blocks + threadIdx.x / FOURS;
  const int end = col < problem.N ? min(Rows::ROWS * (rank + 1) / problem.blocks, problem.M - first_row) : 0;
  float4* partials = problem.partials + int64_t{tile} * problem.clusters * Rows::ROWS * FOURS + four;
  typename Tile::Epilogue epilogue(problem, col);
  const auto store = [&](float (&sums)[4], int row) {
    epilogue.apply(sums, [&](void* matrix) { store_four<T>(problem, matrix, sums, first_row + row, col); });
    problem.out_fp32 ? store_four<float>(problem, problem.out, sums, first_row + row, col)
                     : store_four<T>(problem, problem.out, sums, first_row + row, col);
  };
  uint32_t there[MOST_BLOCKS];
#pragma unroll
  for (int block = 0; block < MOST_BLOCKS; ++block) {
    if (block < problem.blocks) there[block] = address_in(&shared.sums[four * 4], block);
  }
  const int cluster = blockIdx.x / problem.blocks % problem.clusters;
#pragma unroll 1  // the code is read once: the less of it there is, the sooner it has come
  for (int row = begin; row < end; row += STEP) {
    float sums[4] = {};
#pragma unroll
    for (int block = 0; block < MOST_BLOCKS; ++block) {
      if (block < problem.blocks) add(sums, load_shared(there[block] + row * Rows::PITCH * sizeof(float)));
    }
    if (problem.clusters == 1) {
      store(sums, row);
    } else {
      __stcg(partials + (cluster * Rows::ROWS + row) * FOURS,
             make_float4(sums[0], sums[1], sums[2], sums[3]));
    }
  }
  if (problem.clusters == 1) return;

  __syncwarp();                    // for the warp's threads, which have different numbers of rows
  named_barrier_sync(1, THREADS);  // for all threads' partial sums
  if (threadIdx.x == 0) {
    unsigned* arrivals = &problem.counters[tile * problem.blocks + rank];
    __threadfence();  // releases what the whole block has written before the barrier
    shared.last = atomicInc(arrivals, problem.clusters - 1) == problem.clusters - 1;
    __threadfence();  // acquires, for all threads past the next barrier, what earlier arrivals released
  }
  named_barrier_sync(1, THREADS);  // for the arrival's outcome
  if (!shared.last) return;
#pragma unroll 1
  for (int row = begin; row < end; row += STEP) {
    float sums[4] = {};
#pragma unroll 8
    for (int of = 0; of < problem.clusters; ++of)
      add(sums, __ldcg(partials + (of * Rows::ROWS + row) * FOURS));
    store(sums, row);
  }
}

// The kernel's body. The last of its warps fetches, the others multiply.
template <typename Tile>
__device__ void few_rows_block(const typename Tile::Problem& problem) {
  using T = typename Tile::T;
  constexpr int PIECE = PIECE_BYTES / sizeof(T);  // elements
  extern __shared__ __align__(1024) uint8_t dynamic[];
  auto& shared = *reinterpret_cast<typename Tile::Shared*>(dynamic);
  const int warp_id = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be warp-uniform
  const int splits = problem.clusters * problem.blocks;
  const int tile = blockIdx.x / splits;
  const int split = blockIdx.x - tile * splits;
  const int k_begin = static_cast<int>(int64_t{problem.k_blocks} * split / splits);
  const int k_end = static_cast<int>(int64_t{problem.k_blocks} * (split + 1) / splits);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&problem.wide);
    prefetch_tensor_map(&problem.few);
    for (int stage = 0; stage < Tile::STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], Tile::CONSUMERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // for the mbarriers to be initialised

  // Programmatic dependent launch: nothing that the kernel before wrote, or reads, may be touched above this
  // wait.
  if (threadIdx.x == 0) allow_dependent_launch();
  wait_for_previous_kernel();
  if (warp_id == Tile::CONSUMERS * 4) {
    if (threadIdx.x % 32 == 0) {
      const int wide = tile / problem.few_tiles * Tile::BLOCK_WIDE;
      const int few = tile % problem.few_tiles * Tile::BLOCK_FEW;
      int stage = 0;
      uint32_t phase = 0;
      for (int k = k_begin; k < k_end; ++k) {
        mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);  // for the stage to be read by all
        uint64_t* full = &shared.full[stage];
        T* wide_to = shared.stages.wide[stage];
        T* few_to = shared.stages.few[stage];
        mbarrier_arrive_expect_tx(full, Tile::STAGE_BYTES);
        if constexpr (Tile::WIDE_ALONG_K) {
          tma_load(wide_to, &problem.wide, k * BLOCK_K, wide, full);
        } else {
#pragma unroll
          for (int i = 0; i < Tile::BLOCK_WIDE / 64; ++i)
            tma_load(wide_to + i * PIECE, &problem.wide, wide + i * 64, k * BLOCK_K, full);
        }
        if constexpr (Tile::FEW_ALONG_K) {
          tma_load(few_to, &problem.few, k * BLOCK_K, few, full);
        } else {
#pragma unroll
          for (int i = 0; i < Tile::BLOCK_FEW / 64; ++i)
            tma_load(few_to + i * PIECE, &problem.few, few + i * 64, k * BLOCK_K, full);
        }
        if (++stage == Tile::STAGES) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
    __syncwarp();  // its lanes have diverged
  } else {
    const int consumer = warp_id / 4;
    const uint64_t wide_tile = wgmma_tile(&shared.stages.wide[0][consumer * PIECE]);
    const uint64_t few_tile = wgmma_tile(shared.stages.few[0], PIECE_BYTES);
    // 16 elements of K, in units of 16 bytes.
    constexpr int WIDE_STEP = Tile::WIDE_ALONG_K ? 16 * sizeof(T) / 16 : 16 * 128 / 16;
    constexpr int FEW_STEP = Tile::FEW_ALONG_K ? 16 * sizeof(T) / 16 : 16 * 128 / 16;
    const auto release = [&](int stage) {
      if (threadIdx.x % WARPGROUP == 0) mbarrier_arrive(&shared.empty[stage]);
    };
    float sums[Tile::SUMS];
    int stage = 0;
    uint32_t phase = 0;
    for (int k = k_begin; k < k_end; ++k) {
      mbarrier_wait_parity(&shared.full[stage], phase);  // for the stage's tiles
      const uint64_t wide = wide_tile + stage * (sizeof(shared.stages.wide[0]) / 16);
      const uint64_t few = few_tile + stage * (sizeof(shared.stages.few[0]) / 16);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < BLOCK_K / 16; ++step) {
        if constexpr (Tile::BLOCK_FEW < 64) {
          wgmma_m64k16_narrow<Tile::BLOCK_FEW, T, !Tile::WIDE_ALONG_K>(
              sums, wide + step * WIDE_STEP, few + step * FEW_STEP, k > k_begin || step > 0);
        } else {
          wgmma_m64k16<Tile::BLOCK_FEW, T, !Tile::WIDE_ALONG_K, Tile::FEW_ALONG_K>(
              sums, wide + step * WIDE_STEP, few + step * FEW_STEP, k > k_begin || step > 0);
        }
      }
      wgmma_commit_group();
      wgmma_wait_group<1>();  // for the stage before
      if (k > k_begin) release(stage == 0 ? Tile::STAGES - 1 : stage - 1);
      if (++stage == Tile::STAGES) {
        stage = 0;
        phase ^= 1;
      }
    }
    wgmma_wait_group<0>();  // for the sums
    wgmma_hold(sums);
    // The sums take the stages' place.
    named_barrier_sync(1, Tile::CONSUMERS * WARPGROUP);  // for all consumers to have read the stages
    const int lane_id = threadIdx.x % 32;
    const int wide = warp_id * 16 + lane_id / 4;
    const int few = lane_id % 4 * 2;
    if (problem.transposed) {
      constexpr int PITCH = Tile::template Rows<true>::PITCH;
      float* to = &shared.sums[few * PITCH + wide];
#pragma unroll
      for (int j = 0; j < Tile::BLOCK_FEW / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(j * 8 + i % 2) * PITCH + i / 2 * 8] = sums[j * 4 + i];
      }
    } else {
      constexpr int PITCH = Tile::template Rows<false>::PITCH;
      float* to = &shared.sums[wide * PITCH + few];
#pragma unroll
      for (int j = 0; j < Tile::BLOCK_FEW / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          *reinterpret_cast<float2*>(&to[i * 8 * PITCH + j * 8]) =
              make_float2(sums[j * 4 + i * 2], sums[j * 4 + i * 2 + 1]);
      }
    }
  }
  cluster_sync();  // for the sums of all blocks
  if (warp_id < Tile::CONSUMERS * 4) {
    problem.transposed ? finish_tile<Tile, true>(problem, shared, tile)
                       : finish_tile<Tile, false>(problem, shared, tile);
  }
  __syncwarp();  // for the warp's threads, which have different numbers of rows
  cluster_arrive_relaxed();
  cluster_wait();  // for other blocks' loads from this one's shared memory
}

#endif  // 9.0a
