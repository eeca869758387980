// matmul_tf32x3 v05_wgmma: warpgroups multiply by wgmma; B is split once, by a kernel of its own.
//
// Change:   a first kernel splits B, once for all blocks, into big and small columns that are contiguous
//           along K. In the second kernel a producer thread copies tiles by TMA into a ring, and two
//           warpgroups multiply 64 x 128 elements each by wgmma: A's fragments come from shared memory and
//           are split in registers, B's tiles are read where they lie. The kernel is persistent. Tiles of
//           half the width are taken where they need no more rounds of the SMs.
// Why:      mma.sync gets little more than half of a Hopper tensor core's rate, and each warp of v03 splits
//           what others split too. wgmma takes TF32 from shared memory along K only, so B, usually row-major,
//           must be transposed in any case; splitting it in the same pass costs one more write, little beside
//           the product. Split within the second kernel, B would cost each of its blocks three passes over
//           the tile in shared memory, whose bandwidth wgmma needs for itself. The warps that multiply A
//           split it, 16 elements a thread for 24 wgmma. The tensor cores' sums still start anew for every
//           chunk of K and are added outside. A chunk is twice as long as before, since small products come
//           first and so err less. A warpgroup's columns are two parts, each with its sums: one is multiplied
//           while the other is added and starts anew.
// Counter:  tensor_pipe rises; instructions fall.
// Requires: compute capability 9.0 with its own features (sm_90a); M and K below 2^31, N below 2^30; a
//           workspace of twice the size of B. A that the copy engine cannot take is copied by the first
//           kernel too. Infinities and NaNs come out as in fp32. An operand below 2^-114 keeps fewer bits,
//           since its small part ends at 2^-136, TF32's smallest number; TF32's own 11 bits are left at
//           2^-126.
// Twin:     none: tl.dot has been wgmma on Hopper since v01.
#include <algorithm>

#include "args.h"
#include "lib/ptx/ampere.cuh"
#include "lib/ptx/hopper.cuh"
#include "lib/ptx/wgmma.cuh"
#include "lib/tensor_map.h"
#include "split.cuh"

constexpr int BLOCK_M = 128;
constexpr int WIDE_N = 128;   // BLOCK_N
constexpr int NARROW_N = 64;  // the same, for few tiles
constexpr int BLOCK_K = 32;   // 128 bytes, a row of the swizzle
constexpr int CHUNK_K = 64;   // after which the tensor cores' sums begin anew
constexpr int GROUP_M = 8;    // rows of tiles that are walked column by column

constexpr int WARPGROUP = 128;           // threads
constexpr int CONSUMERS = BLOCK_M / 64;  // warpgroups that multiply 64 rows each
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
constexpr int STEPS = BLOCK_K / 8;  // of one wgmma
constexpr int CHUNK_STAGES = CHUNK_K / BLOCK_K;
constexpr int SHARED_BYTES = 232448;  // as much as a block can have

static_assert(CONSUMERS == 2, "registers are shared out for two");
static_assert(BLOCK_K * sizeof(float) == BOX_ROW_BYTES, "a tile's row is a box's");
static_assert(CHUNK_K % BLOCK_K == 0 && CHUNK_STAGES % 2 == 0, "fragments of two stages take turns");

// The second kernel's argument, by value.
struct MatmulTf32x3Problem {
  CUtensorMap a;  // [M, K]
  CUtensorMap b;  // [2 N, K]: big columns, then small ones
  MatmulTf32x3Args args;
};

// The ring, of as many stages as fit.
template <int BLOCK_N>
struct Shared {
  static constexpr int STAGE_BYTES = (BLOCK_M + 2 * BLOCK_N) * BLOCK_K * sizeof(float);
  static constexpr int STAGES = SHARED_BYTES / (STAGE_BYTES + 2 * sizeof(uint64_t));

  float a[STAGES][BLOCK_M * BLOCK_K];     // [BLOCK_M, BLOCK_K]
  float b[STAGES][2][BLOCK_N * BLOCK_K];  // [BLOCK_N, BLOCK_K], big and small
  uint64_t full[STAGES];                  // complete when a stage's tiles have arrived
  uint64_t empty[STAGES];                 // complete when all consumers' warps have read them
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
template <int BLOCK_N>
__device__ inline void store_sums(const MatmulTf32x3Args& args, const float (&sums)[2][BLOCK_N / 4],
                                  int64_t row, int64_t col) {
  constexpr int PART_N = BLOCK_N / 2;
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

__global__ void __launch_bounds__(SPLIT_THREADS)
    matmul_tf32x3_v05_wgmma_split_kernel(const __grid_constant__ SplitJobs jobs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (threadIdx.x == 0) allow_dependent_launch();
  split_tile(jobs);
#endif
}

template <int BLOCK_N>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_tf32x3_v05_wgmma_kernel(const __grid_constant__ MatmulTf32x3Problem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int STAGES = Shared<BLOCK_N>::STAGES;
  constexpr int PART_N = BLOCK_N / 2;  // columns of a wgmma, half of a warpgroup's
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<BLOCK_N>& shared = *reinterpret_cast<Shared<BLOCK_N>*>(memory);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);  // known to be warp-uniform

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&problem.a);
    prefetch_tensor_map(&problem.b);
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.empty[stage], CONSUMERS * 4);
    }
    fence_mbarrier_init();
  }
  __syncthreads();             // for the barriers
  wait_for_previous_kernel();  // for the split operands

  // The tiles that a block computes, in grouped order.
  const int blocks_m = cdiv(problem.args.M, BLOCK_M);
  const int blocks_n = cdiv(problem.args.N, BLOCK_N);
  const int tiles = blocks_m * blocks_n;
  const int k_blocks = cdiv(problem.args.K, CHUNK_K) * CHUNK_STAGES;  // past K there are zeros
  const auto place_of = [&](int tile) {
    const int group = tile / (GROUP_M * blocks_n);
    const int within = tile - group * GROUP_M * blocks_n;
    const int group_rows = min(blocks_m - group * GROUP_M, GROUP_M);
    const int group_col = within / group_rows;
    const int row = group * GROUP_M + within - group_col * group_rows;
    return int2{group_col * BLOCK_N, row * BLOCK_M};
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
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int2 place = place_of(tile);
        for (int k = 0; k < k_blocks; ++k) {
          mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);  // for the stage to be read by all
          uint64_t* full = &shared.full[stage];
          mbarrier_arrive_expect_tx(full, Shared<BLOCK_N>::STAGE_BYTES);
          tma_load(shared.a[stage], &problem.a, k * BLOCK_K, place.y, full);
          tma_load(shared.b[stage][0], &problem.b, k * BLOCK_K, place.x, full);
          tma_load(shared.b[stage][1], &problem.b, k * BLOCK_K, place.x + static_cast<int>(problem.args.N),
                   full);
          advance();
        }
      }
    }
  } else {
    take_registers<240>();
    const int consumer = warpgroup - 1;
    const int lane_id = threadIdx.x % 32;
    const auto release = [&](int read_stage) {
      if (lane_id == 0) mbarrier_arrive(&shared.empty[read_stage]);
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
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
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
        for (int i = 0; i < 3 * STEPS; ++i) {
          const uint32_t (&a)[4] = (i < STEPS ? a_small : a_big)[buffer][i % STEPS];
          const uint64_t b = (i / STEPS == 1 ? b_small : b_big) + i % STEPS * STEP;
          wgmma_m64k8_tf32<PART_N>(part_sums[part], a, b, accumulate || i > 0);
        }
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
        if (k + CHUNK_STAGES < k_blocks || tile + gridDim.x < tiles) read_fragments(0);
        // Waits for the second part as well, while the other warpgroup multiplies: ptxas does not follow
        // wgmma's sums around a loop, and would otherwise wait after each wgmma.
        wgmma_wait_group<0>();
      }
      add_part(1);
      release(stage == 0 ? STAGES - 1 : stage - 1);
      const int2 place = place_of(tile);
      store_sums<BLOCK_N>(problem.args, sums, place.y + consumer * 64, place.x);
    }
  }
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
  matmul_tf32x3_v05_wgmma_split_kernel<<<split_tiles(jobs), SPLIT_THREADS, 0, args.stream>>>(jobs);
  CUDA_CHECK(cudaGetLastError());

  const int64_t sms = multiprocessor_count();
  const auto tiles = [&](int block_n) { return cdiv(args.M, BLOCK_M) * cdiv(args.N, block_n); };
  // A narrow tile takes little more than half as long.
  const bool narrow = cdiv(tiles(NARROW_N), sms) <= cdiv(tiles(WIDE_N), sms);
  const int block_n = narrow ? NARROW_N : WIDE_N;
  MatmulTf32x3Problem problem = {};
  problem.a = tensor_map(a, Dtype::fp32, args.M, args.K, pitch_a, BLOCK_M);
  problem.b = tensor_map(b, Dtype::fp32, 2 * args.N, args.K, pitch, block_n);
  problem.args = args;
  const auto kernel =
      narrow ? matmul_tf32x3_v05_wgmma_kernel<NARROW_N> : matmul_tf32x3_v05_wgmma_kernel<WIDE_N>;
  const size_t shared_bytes = narrow ? sizeof(Shared<NARROW_N>) : sizeof(Shared<WIDE_N>);
  allow_shared_memory(kernel, shared_bytes);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  const cudaLaunchConfig_t config = {.gridDim = dim3(std::min(tiles(block_n), sms)),
                                     .blockDim = dim3(THREADS),
                                     .dynamicSmemBytes = shared_bytes,
                                     .stream = args.stream,
                                     .attrs = &attribute,
                                     .numAttrs = 1};
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, problem));
}
