// matmul_tf32x3 v05_wgmma: warpgroups multiply tiles that come split, by the tensor memory accelerator.
//
// Change:   a first kernel splits B, once for all, into big and small columns that are contiguous along K. In
//           the second a producer thread has tiles copied into a ring, and two warpgroups multiply 64 x 128
//           elements each by wgmma: A's fragments come from shared memory and are split in registers, B's
//           tiles are read where they lie. Blocks stay and walk over the tiles; two of a cluster, one below
//           the other, share their tiles of B.
// Why:      mma.sync gets little more than half of a Hopper tensor core's rate, and each warp split what
//           others split too. wgmma takes TF32 from shared memory along K only, so B, usually row-major, must
//           be turned round in any case, and a split in the same pass costs one more write: some 6 % of the
//           product of 4096. Split within the second kernel, B would cost each of its blocks three passes
//           over the tile in shared memory, whose bandwidth wgmma needs for itself. A is split by those that
//           multiply it, 16 elements a thread for 24 wgmma.
//           The tensor cores' sums still begin anew for every chunk of K and are added outside. A chunk is
//           twice as long as before, since small products come first and so err less. The sums are two parts
//           of the columns: one is multiplied while the other is added and begun anew.
// Counter:  tensor_pipe rises; instructions fall by more than half.
// Requires: compute capability 9.0 with its own features (sm_90a); M and K below 2^31, N below 2^30; a
//           workspace of twice the size of B. A that the copy engine cannot take is copied by the first
//           kernel too. Infinities and NaNs come out as in fp32. An operand below 2^-114 keeps fewer bits,
//           since its small part ends at 2^-136, TF32's smallest number; TF32's own 11 bits are left at
//           2^-126.
// Twin:     none: tl.dot has been wgmma on Hopper since v01.
#include <algorithm>
#include <iterator>

#include "../ampere.cuh"
#include "../hopper.cuh"
#include "../tensor_map.h"
#include "../wgmma.cuh"
#include "args.h"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 32;  // 128 bytes, a row of the swizzle
constexpr int CHUNK_K = 64;  // after which the tensor cores' sums begin anew
constexpr int CLUSTER = 2;
constexpr int STAGES = 4;
constexpr int GROUP_M = 8;  // rows of clusters' tiles that are walked column by column

constexpr int WARPGROUP = 128;           // threads
constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that multiply 64 rows each
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int STEPS = BLOCK_K / 8;   // of one wgmma
constexpr int PART_N = BLOCK_N / 2;  // columns of a wgmma, half of a warpgroup's
constexpr int CHUNK_STAGES = CHUNK_K / BLOCK_K;
constexpr int STAGE_BYTES = (BLOCK_M + 2 * BLOCK_N) * BLOCK_K * sizeof(float);

constexpr int SPLIT_TILE = 64;
constexpr int SPLIT_THREADS = 256;

static_assert(CONSUMERS == 2, "registers are shared out for two");
static_assert(BLOCK_K * sizeof(float) == BOX_ROW_BYTES, "a tile's row is a box's");
static_assert(CHUNK_K % BLOCK_K == 0 && CHUNK_STAGES % 2 == 0, "fragments of two stages take turns");
static_assert(BLOCK_N % (8 * CLUSTER) == 0, "blocks of a cluster fetch whole units of the swizzle");

// x = big + small but for its last bit. The subtraction is exact, and leaves at most 13 bits.
__device__ inline void split(uint32_t x, uint32_t& big, uint32_t& small) {
  big = to_tf32(__uint_as_float(x));
  small = __float_as_uint(__uint_as_float(x) - __uint_as_float(big));
}

// An operand that the first kernel copies into rows of neighbours along K, split or as it is.
struct SplitJob {
  const float* from;  // [lines, K]
  float* to;          // [lines, pitch], and behind it, if split, as much again for small
  int64_t lines, K;
  int64_t stride, stride_k;
  int64_t pitch;  // a multiple of 4
  bool split;
};

struct SplitJobs {
  SplitJob job[2];  // one without lines is none
};

__global__ void __launch_bounds__(SPLIT_THREADS)
    matmul_tf32x3_v05_wgmma_split_kernel(const __grid_constant__ SplitJobs jobs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ float tile[SPLIT_TILE][SPLIT_TILE + 1];  // [lines, K]; padded, as it is filled either way
  if (threadIdx.x == 0) allow_dependent_launch();

  // The first job's tiles come first.
  int64_t index = blockIdx.x;
  const int64_t tiles_of_first = cdiv(jobs.job[0].lines, SPLIT_TILE) * cdiv(jobs.job[0].K, SPLIT_TILE);
  const bool second = index >= tiles_of_first;
  if (second) index -= tiles_of_first;
  const SplitJob& job = second ? jobs.job[1] : jobs.job[0];
  const int64_t tiles_k = cdiv(job.K, SPLIT_TILE);
  const int64_t first_line = index / tiles_k * SPLIT_TILE;
  const int64_t first_k = index % tiles_k * SPLIT_TILE;
  const int lines = min(job.lines - first_line, int64_t{SPLIT_TILE});
  const int depth = min(job.K - first_k, int64_t{SPLIT_TILE});

  // A warp reads along the smaller stride.
  constexpr int WARPS = SPLIT_THREADS / 32;
  const int warp_id = threadIdx.x / 32;
  const int lane_id = threadIdx.x % 32;
  const bool along_k = job.stride_k <= job.stride;
  const float* from = job.from + first_line * job.stride + first_k * job.stride_k;
  float loaded[SPLIT_TILE / WARPS][SPLIT_TILE / 32];
#pragma unroll
  for (int i = 0; i < SPLIT_TILE / WARPS; ++i) {
#pragma unroll
    for (int j = 0; j < SPLIT_TILE / 32; ++j) {
      const int line = along_k ? i * WARPS + warp_id : j * 32 + lane_id;
      const int k = along_k ? j * 32 + lane_id : i * WARPS + warp_id;
      loaded[i][j] = line < lines && k < depth ? __ldcs(from + line * job.stride + k * job.stride_k) : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < SPLIT_TILE / WARPS; ++i) {
#pragma unroll
    for (int j = 0; j < SPLIT_TILE / 32; ++j) {
      const int line = along_k ? i * WARPS + warp_id : j * 32 + lane_id;
      const int k = along_k ? j * 32 + lane_id : i * WARPS + warp_id;
      tile[line][k] = loaded[i][j];
    }
  }
  __syncthreads();  // for the tile

  const int k = threadIdx.x % (SPLIT_TILE / 4) * 4;
  for (int line = threadIdx.x / (SPLIT_TILE / 4); line < lines; line += SPLIT_THREADS / (SPLIT_TILE / 4)) {
    if (k >= depth) break;  // behind the last element a row has room to complete its four, with zeros
    uint32_t x[4], big[4], small[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = __float_as_uint(tile[line][k + i]);
      split(x[i], big[i], small[i]);
      small[i] = to_tf32(__uint_as_float(small[i]));  // its last bit, which wgmma would drop, is rounded
      if (!job.split) big[i] = x[i];
    }
    float* to = job.to + (first_line + line) * job.pitch + first_k + k;
    *reinterpret_cast<uint4*>(to) = make_uint4(big[0], big[1], big[2], big[3]);
    if (!job.split) continue;
    to += job.lines * job.pitch;
    *reinterpret_cast<uint4*>(to) = make_uint4(small[0], small[1], small[2], small[3]);
  }
#endif
}

// What the second kernel is told, by value.
struct Problem {
  CUtensorMap a;  // [M, K]
  CUtensorMap b;  // [2 N, K]: big columns, then small ones
  MatmulTf32x3Args args;
};

struct Shared {
  float a[STAGES][BLOCK_M * BLOCK_K];     // [BLOCK_M, BLOCK_K]
  float b[STAGES][2][BLOCK_N * BLOCK_K];  // [BLOCK_N, BLOCK_K], big and small
  uint64_t full[STAGES];                  // complete when a stage's tiles have come
  uint64_t empty[STAGES];                 // complete when all warps of the cluster have read them
};

// One element by the formula, in fp32 alone.
__device__ inline float plain_sum(const MatmulTf32x3Args& args, int64_t row, int64_t col) {
  const float* a = args.a + row * args.stride_am;  // [K]
  const float* b = args.b + col * args.stride_bn;  // [K]
  float sum = 0.0f;
  for (int64_t k = 0; k < args.K; ++k) sum += a[k * args.stride_ak] * b[k * args.stride_bk];
  return sum;
}

// Writes the thread's elements of a tile whose first is (row, col) for this warpgroup.
__device__ inline void store_sums(const MatmulTf32x3Args& args, const float (&sums)[2][PART_N / 2],
                                  int64_t row, int64_t col) {
  const int lane_id = threadIdx.x % 32;
  row += threadIdx.x % WARPGROUP / 32 * 16 + lane_id / 4;
  col += lane_id % 4 * 2;
  const bool pairs = args.N % 2 == 0 && reinterpret_cast<uintptr_t>(args.out) % 8 == 0;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* out = args.out + (row + i * 8) * args.N + col;
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; ++j) {
      const float left = sums[j / (PART_N / 8)][j % (PART_N / 8) * 4 + i * 2];
      const float right = sums[j / (PART_N / 8)][j % (PART_N / 8) * 4 + i * 2 + 1];
      if (row + i * 8 >= args.M || col + j * 8 >= args.N) continue;
      finite &= isfinite(left) && isfinite(right);
      if (pairs) {
        *reinterpret_cast<float2*>(out + j * 8) = make_float2(left, right);
      } else {
        out[j * 8] = left;
        if (col + j * 8 + 1 < args.N) out[j * 8 + 1] = right;
      }
    }
  }

  // An infinite operand splits into inf and NaN, and the largest finite ones round up to inf: sums with them
  // come out as NaN. What is not finite is therefore summed again without splitting, which is right by
  // definition, and rare.
  if (finite) return;
  for (int i = 0; i < BLOCK_N / 2; ++i) {
    const int64_t its_row = row + i % 2 * 8;
    const int64_t its_col = col + i / 4 * 8 + i / 2 % 2;
    if (its_row >= args.M || its_col >= args.N) continue;
    float* out = args.out + its_row * args.N + its_col;
    if (!isfinite(*out)) *out = plain_sum(args, its_row, its_col);
  }
}

__global__ void __launch_bounds__(THREADS, 1)
    matmul_tf32x3_v05_wgmma_kernel(const __grid_constant__ Problem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be the warp's
  const int rank = CLUSTER == 1 ? 0 : cluster_block();

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&problem.a);
    prefetch_tensor_map(&problem.b);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], CONSUMERS * 4 * CLUSTER);
    }
    fence_mbarrier_init();
  }
  if constexpr (CLUSTER == 1) {
    __syncthreads();  // for the barriers
  } else {
    cluster_sync();  // for those of both blocks
  }
  wait_for_previous_kernel();  // for what it has split

  // The tiles that a block computes, in grouped order.
  const int blocks_m = cdiv(problem.args.M, BLOCK_M * CLUSTER);  // of clusters
  const int blocks_n = cdiv(problem.args.N, BLOCK_N);
  const int tiles = blocks_m * blocks_n;
  const int first_tile = blockIdx.x / CLUSTER;
  const int tile_step = gridDim.x / CLUSTER;
  const int k_blocks = cdiv(problem.args.K, CHUNK_K) * CHUNK_STAGES;  // past K there are zeros
  const auto place_of = [&](int tile) {
    const int group = tile / (GROUP_M * blocks_n);
    const int within = tile - group * GROUP_M * blocks_n;
    const int group_rows = min(blocks_m - group * GROUP_M, GROUP_M);
    const int group_col = within / group_rows;
    const int row = group * GROUP_M + within - group_col * group_rows;
    return int2{group_col * BLOCK_N, (row * CLUSTER + rank) * BLOCK_M};
  };

  int stage = 0;
  uint32_t phase = 0;
  const auto advance = [&] {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  };
  if (warpgroup == 0) {
    give_back_registers<24>();
    if (threadIdx.x == 0) {
      for (int tile = first_tile; tile < tiles; tile += tile_step) {
        const int2 place = place_of(tile);
        for (int k = 0; k < k_blocks; ++k) {
          mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);  // for the stage to be read by all
          uint64_t* full = &shared.full[stage];
          mbarrier_arrive_expect_tx(full, STAGE_BYTES);
          tma_load(shared.a[stage], &problem.a, k * BLOCK_K, place.y, full);
          // Every block of a cluster fetches its share of B's tiles, for all.
          constexpr int COLS = BLOCK_N / CLUSTER;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float* to = &shared.b[stage][i][rank * COLS * BLOCK_K];
            const int col = place.x + rank * COLS + (i == 0 ? 0 : static_cast<int>(problem.args.N));
            if constexpr (CLUSTER == 1) {
              tma_load(to, &problem.b, k * BLOCK_K, col, full);
            } else {
              tma_load_multicast(to, &problem.b, k * BLOCK_K, col, full, (1 << CLUSTER) - 1);
            }
          }
          advance();
        }
      }
    }
  } else {
    take_registers<240>();
    const int consumer = warpgroup - 1;
    const int lane_id = threadIdx.x % 32;
    const auto release = [&](int read_stage) {
      if constexpr (CLUSTER == 1) {
        if (lane_id == 0) mbarrier_arrive(&shared.empty[read_stage]);
      } else {
        if (lane_id < CLUSTER) mbarrier_arrive_in(&shared.empty[read_stage], lane_id);
      }
    };
    // ldmatrix moves 16 bytes of a row, be they eight numbers or four; the copy engine has swizzled them.
    const int a_row = consumer * 64 + threadIdx.x / 32 % 4 * 16 + lane_id % 16;
    const int a_offset = a_row * BOX_ROW_BYTES + (lane_id / 16 ^ lane_id % 8) * 16;
    const uint64_t b_tile = wgmma_tile(shared.b[0]);

    // Fragments of two stages, in turn: wgmma still reads those of the last when the next are split.
    uint32_t a_big[2][STEPS][4], a_small[2][STEPS][4];
    const auto read_fragments = [&](int buffer) {
      mbarrier_wait_parity(&shared.full[stage], phase);  // for the stage's tiles
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        uint32_t bits[4];
        ldmatrix_x4(bits, reinterpret_cast<const uint8_t*>(shared.a[stage]) + (a_offset ^ step * 32));
#pragma unroll
        for (int i = 0; i < 4; ++i) split(bits[i], a_big[buffer][step][i], a_small[buffer][step][i]);
      }
    };

    const auto hold_fragments = [&](int buffer) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        wgmma_hold(a_big[buffer][step]);
        wgmma_hold(a_small[buffer][step]);
      }
    };

    read_fragments(0);
    for (int tile = first_tile; tile < tiles; tile += tile_step) {
      float sums[2][PART_N / 2] = {};
      float part_sums[2][PART_N / 2] = {};  // the tensor cores', of a chunk
      const auto add_part = [&](int part) {
        wgmma_hold(part_sums[part]);
#pragma unroll
        for (int i = 0; i < PART_N / 2; ++i) sums[part][i] += part_sums[part][i];
      };
      const auto multiply_part = [&](int part, int buffer, bool accumulate) {
        constexpr int STEP = 8 * sizeof(float) / 16;  // 8 of K, in 16 bytes
        const uint64_t b_big =
            b_tile + stage * (sizeof(shared.b[0]) / 16) + part * (PART_N * BLOCK_K * sizeof(float) / 16);
        const uint64_t b_small = b_big + sizeof(shared.b[0][0]) / 16;
        wgmma_fence();
        // Small products first: the less the sums hold, the less they lose when they round toward zero.
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
          wgmma_m64k8_tf32<PART_N>(part_sums[part], a_small[buffer][i], b_big + i * STEP,
                                   accumulate || i > 0);
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
          wgmma_m64k8_tf32<PART_N>(part_sums[part], a_big[buffer][i], b_small + i * STEP, true);
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
          wgmma_m64k8_tf32<PART_N>(part_sums[part], a_big[buffer][i], b_big + i * STEP, true);
        wgmma_commit_group();
      };
      for (int k = 0; k < k_blocks; k += CHUNK_STAGES) {
#pragma unroll
        for (int i = 0; i < CHUNK_STAGES; ++i) {
          if (i > 0) read_fragments(i % 2);
          multiply_part(0, i % 2, i > 0);
          wgmma_wait_group<1>();    // for the second part of the stage before, which is then all read
          if (i == 0) add_part(1);  // of the chunk before
          hold_fragments(1 - i % 2);
          if (k + i > 0) release(stage == 0 ? STAGES - 1 : stage - 1);
          multiply_part(1, i % 2, i > 0);
          advance();
        }
        wgmma_wait_group<1>();  // for the first part of the chunk
        add_part(0);
        if (k + CHUNK_STAGES < k_blocks || tile + tile_step < tiles) read_fragments(0);
        // The second part is waited for as well, while the other warpgroup multiplies on: ptxas follows no
        // sums round a loop, and would else wait for each wgmma.
        wgmma_wait_group<0>();
      }
      add_part(1);
      release(stage == 0 ? STAGES - 1 : stage - 1);
      const int2 place = place_of(tile);
      store_sums(problem.args, sums, place.y + consumer * 64, place.x);
    }
  }
  if constexpr (CLUSTER > 1) cluster_sync();  // and the other block's copies into this one, and arrivals
#endif
}

void matmul_tf32x3_v05_wgmma(const MatmulTf32x3Args& args) {
  if (args.M == 0 || args.N == 0) return;
  if (args.K == 0) {
    CUDA_CHECK(cudaMemsetAsync(args.out, 0, args.M * args.N * sizeof(float), args.stream));
    return;
  }
  if (std::max({args.M, 2 * args.N, args.K}) >= LARGEST_SIZE) {
    throw std::runtime_error("M, 2 N and K must be below " + std::to_string(LARGEST_SIZE) +
                             " for this step: take v03_pipelined");
  }

  const int64_t pitch = cdiv(args.K, BLOCK_K) * BLOCK_K;
  SplitJobs jobs = {};
  float* b = static_cast<float*>(args.memory->workspace(2 * args.N * pitch * sizeof(float)));
  jobs.job[0] = {args.b, b, args.N, args.K, args.stride_bn, args.stride_bk, pitch, true};
  const float* a = args.a;
  int64_t pitch_a = args.M == 1 ? pitch : args.stride_am;  // of one row it means nothing
  if ((args.stride_ak != 1 && args.K != 1) || !mappable(a, Dtype::fp32, args.M, args.K, pitch_a)) {
    float* copy = static_cast<float*>(args.memory->workspace(args.M * pitch * sizeof(float)));
    jobs.job[1] = {args.a, copy, args.M, args.K, args.stride_am, args.stride_ak, pitch, false};
    a = copy;
    pitch_a = pitch;
  }
  const int64_t split_tiles =
      (cdiv(args.N, SPLIT_TILE) + cdiv(jobs.job[1].lines, SPLIT_TILE)) * cdiv(args.K, SPLIT_TILE);
  matmul_tf32x3_v05_wgmma_split_kernel<<<split_tiles, SPLIT_THREADS, 0, args.stream>>>(jobs);
  CUDA_CHECK(cudaGetLastError());

  Problem problem = {};
  problem.a = tensor_map(a, Dtype::fp32, args.M, args.K, pitch_a, BLOCK_M);
  problem.b = tensor_map(b, Dtype::fp32, 2 * args.N, args.K, pitch, BLOCK_N / CLUSTER);
  problem.args = args;
  constexpr int SHARED = sizeof(Shared);
  allow_shared_memory(matmul_tf32x3_v05_wgmma_kernel, SHARED);
  const int64_t tiles = cdiv(args.M, BLOCK_M * CLUSTER) * cdiv(args.N, BLOCK_N);  // of clusters
  const int64_t most = multiprocessor_count() / CLUSTER;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {CLUSTER, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(std::min(tiles, most) * CLUSTER);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = SHARED;
  config.stream = args.stream;
  config.attrs = attributes;
  config.numAttrs = std::size(attributes);
  CUDA_CHECK(cudaLaunchKernelEx(&config, matmul_tf32x3_v05_wgmma_kernel, problem));
}
