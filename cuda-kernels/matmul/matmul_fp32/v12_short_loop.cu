// matmul_fp32 v12_short_loop: the main loop is cut to what the SM can fetch and what its registers deliver.
//
// Change:   an iteration of the loop is 16 of a tile's 32 k, not all of them: 35 KiB of code instead of 68. A
//           thread goes through its sums in two patches of 8 x 8, not in rows of 16. A warp waits for one
//           barrier a tile instead of two, and blocks find their tiles by 32-bit divisions.
// Why:      4,096 FMAs are 64 KiB of code, which the instruction caches do not keep: warps wait for
//           instructions, and where no SM has a second block, as at 2048^3, the slowest SM decides. A shorter
//           loop must keep the order of its FMAs all the same: three operands to fetch, or two from the same
//           register bank, take another cycle. The predictions came after a trial, which gained most at
//           2048^3.
// Counter:  no_instruction stalls fall.
// Requires: as v11_tma: sm_90a, 193 KiB of shared memory a block, M, N and K below 2^31; an operand that the
//           copy engine cannot take is copied once into rows that it can.
// Source:   the walk through a patch, back and forth, is that of maxas (S. Gray), for the reuse of operands.
// Twin:     none: Triton's compiler unrolls and orders the FMAs of a tl.dot by itself.
#include <algorithm>

#include "args.h"
#include "lib/common.cuh"
#include "lib/ptx/hopper.cuh"
#include "lib/repack.cuh"
#include "lib/tensor_map.h"

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 256;
constexpr int WARP_M = 64;
constexpr int WARP_N = 64;
constexpr int THREAD_M = 8;
constexpr int THREAD_N = 16;
constexpr int STAGES = 4;
constexpr int GROUP_M = 16;
constexpr int PRODUCER_REGISTERS = 72;
constexpr int CONSUMER_REGISTERS = 216;  // with fewer, the compiler no longer minds banks

constexpr int BLOCK_K = 32;     // 128 bytes, a row of the swizzle
constexpr int UNROLLED_K = 16;  // a loop iteration
constexpr int PATCH_N = 8;      // columns of a thread that are multiplied together
constexpr int PIECE = 32;       // rows or columns of an operand that are fetched together
constexpr int PIECES_M = BLOCK_M / PIECE;
constexpr int PIECES_N = BLOCK_N / PIECE;
constexpr int PIECES = PIECES_M + PIECES_N;
constexpr int WARPGROUP = 128;  // threads
constexpr int TURNERS = 3;      // warps that transpose pieces
constexpr int WARPS_N = BLOCK_N / WARP_N;
constexpr int CONSUMERS = BLOCK_M / WARP_M * WARPS_N;  // warps that multiply
constexpr int THREADS = WARPGROUP + CONSUMERS * 32;
constexpr int LANES_M = WARP_M / THREAD_M;
constexpr int LANES_N = WARP_N / THREAD_N;

static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0 && GROUP_M > 0, "warps tile the block");
static_assert(WARP_M % PIECE == 0 && WARP_N % PIECE == 0, "pieces tile the warp's share");
static_assert(TURNERS < WARPGROUP / 32, "the first warp fetches");
static_assert(LANES_M == 8 && LANES_N == 4 && THREAD_M % 4 == 0 && THREAD_N % 8 == 0,
              "eight lanes read a row of a piece of a, four half a row of one of b");
static_assert(BLOCK_K % UNROLLED_K == 0 && UNROLLED_K % 8 == 0,
              "a row's swizzle is known when it is compiled");
static_assert(THREAD_N == 2 * PATCH_N, "the second patch ends in the row where the first began");
static_assert(CONSUMERS % 4 == 0, "setmaxnreg is for whole warpgroups");
static_assert(PRODUCER_REGISTERS * WARPGROUP + CONSUMER_REGISTERS * CONSUMERS * 32 <=
                  65536 / THREADS / 8 * 8 * THREADS,
              "a warpgroup that takes registers waits until as many have been given back");

// PIECE rows or columns of an operand, fetched as [k][PIECE]; or as [PIECE][k] if the operand is contiguous
// along k, and then transposed. Vector c of row r lies at c ^ r % 8.
struct alignas(1024) Piece {
  float4 rows[BLOCK_K][PIECE / 4];
};

struct Shared {
  Piece stages[STAGES][PIECES];  // first those of a
  uint64_t full[STAGES];         // complete when a stage's pieces have arrived
  uint64_t turned[STAGES];       // complete when its pieces are transposed, where needed
  uint64_t empty[STAGES];        // complete when all warps have read them
};

// The kernel's argument, by value.
struct Problem {
  CUtensorMap a, b;
  bool a_turned, b_turned;  // contiguous along k, so pieces are transposed
  bool store_vector;        // rows of out begin at multiples of 16 bytes, and N is a multiple of 4
  float* out;               // [M, N], row-major
  int64_t M, N;
  int tiles;  // along K
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One thread fetches the pieces of a stage.
__device__ inline void fetch(const Problem& problem, Piece (&pieces)[PIECES], int row, int col, int k,
                             uint64_t* full) {
  mbarrier_arrive_expect_tx(full, sizeof(pieces));
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const bool of_a = i < PIECES_M;
    const bool turned = of_a ? problem.a_turned : problem.b_turned;
    const int line = of_a ? row + i * PIECE : col + (i - PIECES_M) * PIECE;
    tma_load(&pieces[i], of_a ? &problem.a : &problem.b, turned ? k : line, turned ? line : k, full);
  }
}

// A warp transposes a piece in place, in blocks of 4 x 4. Lanes take blocks along diagonals, so that eight of
// them, whose 128 bytes move together, touch all banks when they load and when they store, and that each half
// of the blocks is its own transpose: 16 values a lane are under way at a time.
__device__ inline void turn(Piece& piece) {
  const int lane_id = threadIdx.x % 32;
  const int col = lane_id % 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = col ^ (half * 4 + lane_id / 8);
    float4 block[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) block[i] = piece.rows[row * 4 + i][col ^ (row * 4 + i) % 8];
    const float4 turned[4] = {{block[0].x, block[1].x, block[2].x, block[3].x},
                              {block[0].y, block[1].y, block[2].y, block[3].y},
                              {block[0].z, block[1].z, block[2].z, block[3].z},
                              {block[0].w, block[1].w, block[2].w, block[3].w}};
    __syncwarp();  // for all lanes' loads, before they are written over
#pragma unroll
    for (int i = 0; i < 4; ++i) piece.rows[col * 4 + i][row ^ (col * 4 + i) % 8] = turned[i];
  }
}

#endif

__global__ void __launch_bounds__(THREADS, 1)
    matmul_fp32_v12_short_loop_kernel(const __grid_constant__ Problem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);

  // One block a tile: a persistent one would only gain to fill the ring while it stores, a small part of a
  // tile's time. The grid is flat. Tiles are numbered down the columns of a group of GROUP_M tile rows, so
  // that the blocks that run at the same time cover a near-square patch of out.
  const uint32_t blocks_m = cdiv(problem.M, BLOCK_M);
  const uint32_t blocks_n = cdiv(problem.N, BLOCK_N);
  const uint32_t group_row = blockIdx.x / (GROUP_M * blocks_n) * GROUP_M;
  const uint32_t group_rows = min(blocks_m - group_row, uint32_t{GROUP_M});
  const uint32_t within = blockIdx.x % (GROUP_M * blocks_n);
  const int64_t block_row = int64_t{group_row + within % group_rows} * BLOCK_M;
  const int64_t block_col = int64_t{within / group_rows} * BLOCK_N;

  const int first_turned = problem.a_turned ? 0 : PIECES_M;
  const int turned_pieces = (problem.b_turned ? PIECES : PIECES_M) - first_turned;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(&shared.full[stage], 1);
      mbarrier_init(&shared.turned[stage], max(turned_pieces * 32, 1));
      mbarrier_init(&shared.empty[stage], CONSUMERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // for the barriers

  const int warp_id = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be warp-uniform
  const int lane_id = threadIdx.x % 32;
  int stage = 0;
  uint32_t phase = 0;
  const auto advance = [&] {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  };
  if (warp_id < WARPGROUP / 32) {
    give_back_registers<PRODUCER_REGISTERS>();
    if (warp_id == 0) {
      if (lane_id == 0) {
        for (int tile = 0; tile < problem.tiles; ++tile) {
          mbarrier_wait_parity(&shared.empty[stage], phase ^ 1);  // for the stage to be read by all
          fetch(problem, shared.stages[stage], block_row, block_col, tile * BLOCK_K, &shared.full[stage]);
          advance();
        }
      }
    } else {
      // Pieces of all tiles are dealt out in turn. `piece` is of this tile or of a later one.
      int piece = warp_id - 1;
      for (int tile = 0; tile < problem.tiles && turned_pieces > 0; ++tile, piece -= turned_pieces) {
        for (; piece < turned_pieces; piece += TURNERS) {
          mbarrier_wait_parity(&shared.full[stage], phase);  // for the piece
          turn(shared.stages[stage][first_turned + piece]);
          fence_proxy_async();  // orders these accesses before the copy that fills the place next
          mbarrier_arrive(&shared.turned[stage]);
        }
        advance();
      }
    }
  } else {
    take_registers<CONSUMER_REGISTERS>();

    // Lanes l and l ^ 1 share their rows. Half a warp reads at a time: eight vectors of a, two of b.
    const int consumer = warp_id - WARPGROUP / 32;
    const int lane_of_8 = lane_id / 2 % 8;
    const int lane_of_4 = lane_id / 16 * 2 + lane_id % 2;
    const int warp_row = consumer / WARPS_N * WARP_M;
    const int warp_col = consumer % WARPS_N * WARP_N;

    alignas(16) float sums[THREAD_M][THREAD_N] = {};
    alignas(16) float a_fragment[2][THREAD_M];
    alignas(16) float b_fragment[2][THREAD_N];
    // `swizzle` is k % 8, whose value the compiler knows even where it does not know k's.
    const auto load_fragments = [&](int buffer, int k, int swizzle) {
      const Piece* a = &shared.stages[stage][warp_row / PIECE];
      const Piece* b = &shared.stages[stage][PIECES_M + warp_col / PIECE];
#pragma unroll
      for (int i = 0; i < THREAD_M; i += 4) {
        *reinterpret_cast<float4*>(&a_fragment[buffer][i]) = a[i / 4].rows[k][lane_of_8 ^ swizzle];
      }
#pragma unroll
      for (int j = 0; j < THREAD_N; j += 4) {
        // The constant bits of the vector's number stay a constant.
        *reinterpret_cast<float4*>(&b_fragment[buffer][j]) =
            b[j / 8].rows[k][(lane_of_4 ^ swizzle % 4) + (j ^ swizzle) / 4 % 2 * 4];
      }
    };
    // Back and forth, down the one patch and up the other, so that an FMA shares one operand with the last:
    // the register file, which delivers two a cycle, is then asked for two.
    const auto multiply = [&](int buffer) {
#pragma unroll
      for (int patch = 0; patch < THREAD_N; patch += PATCH_N) {
#pragma unroll
        for (int down = 0; down < THREAD_M; ++down) {
          const int i = patch == 0 ? down : THREAD_M - 1 - down;
#pragma unroll
          for (int right = 0; right < PATCH_N; ++right) {
            const int j = patch + (down % 2 == 0 ? right : PATCH_N - 1 - right);
            sums[i][j] += a_fragment[buffer][i] * b_fragment[buffer][j];
          }
        }
      }
    };
    // The warps that transpose have waited for the whole stage, so a wait for them covers the other pieces,
    // too.
    uint64_t* ready = turned_pieces > 0 ? shared.turned : shared.full;
    const auto wait = [&] { mbarrier_wait_parity(&ready[stage], phase); };  // for the pieces, turned or not

    wait();
    load_fragments(0, 0, 0);
#pragma unroll 1
    for (int left = problem.tiles; left > 0; --left) {
#pragma unroll 1
      for (int first_k = 0; first_k < BLOCK_K; first_k += UNROLLED_K) {
#pragma unroll
        for (int i = 0; i < UNROLLED_K; ++i) {
          int next_k = first_k + i + 1;
          if (i == UNROLLED_K - 1 && next_k == BLOCK_K) {
            __syncwarp();  // for all lanes' loads from this stage, the last of which are behind
            if (lane_id == 0) mbarrier_arrive(&shared.empty[stage]);
            advance();
            if (left > 1) wait();
            next_k = 0;
          }
          load_fragments((i + 1) % 2, next_k, (i + 1) % 8);
          multiply(i % 2);
        }
      }
    }

#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
      const int64_t row = block_row + warp_row + lane_of_8 * 4 + i / 4 * 4 * LANES_M + i % 4;
      if (row >= problem.M) continue;
#pragma unroll
      for (int j = 0; j < THREAD_N; j += 4) {
        const int64_t col = block_col + warp_col + lane_of_4 * 4 + j * LANES_N;
        float* out = problem.out + row * problem.N + col;
        if (problem.store_vector && col < problem.N) {
          *reinterpret_cast<float4*>(out) = *reinterpret_cast<const float4*>(&sums[i][j]);
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (col + e < problem.N) out[e] = sums[i][j + e];
          }
        }
      }
    }
  }
#endif
}

// An operand as the copy engine sees it: lines of contiguous elements, along K if turned, else along M or N.
struct Operand {
  const void* base;
  int64_t lines, length, pitch;
  bool turned;
};

void matmul_fp32_v12_short_loop(const MatmulFp32Args& args) {
  if (args.M == 0 || args.N == 0) return;
  if (args.K == 0) {
    CUDA_CHECK(cudaMemsetAsync(args.out, 0, args.M * args.N * sizeof(float), args.stream));
    return;
  }
  if (std::max({args.M, args.N, args.K}) >= LARGEST_SIZE) {
    throw std::runtime_error("M, N and K must be below " + std::to_string(LARGEST_SIZE) +
                             " for this step: take v09_pipelined");
  }

  RepackJobs jobs = {};
  const auto operand = [&](const float* matrix, int64_t size, int64_t stride, int64_t stride_k,
                           RepackJob& job) -> Operand {
    // The pitch of a single line is never used, so it gets a valid value.
    const auto padded = [](int64_t length) { return cdiv(length, PIECE) * PIECE; };
    const bool along_k = stride_k == 1 || args.K == 1;
    const bool across_k = stride == 1 || size == 1;
    const Operand across = {matrix, args.K, size, args.K == 1 ? padded(size) : stride_k, false};
    const Operand along = {matrix, size, args.K, size == 1 ? padded(args.K) : stride, true};
    for (const Operand& as : {across, along}) {
      if ((as.turned ? along_k : across_k) && mappable(as.base, Dtype::fp32, as.lines, as.length, as.pitch))
        return as;
    }
    const bool turned = across_k ? along_k && args.K > 1 : along_k || stride_k < stride;
    Operand copy = turned ? along : across;
    copy.pitch = padded(copy.length);
    copy.base = args.memory->workspace(copy.lines * copy.pitch * sizeof(float));
    job = {matrix,      const_cast<void*>(copy.base), copy.lines,
           copy.length, turned ? stride : stride_k,   turned ? stride_k : stride,
           copy.pitch};
    return copy;
  };
  const Operand a = operand(args.a, args.M, args.stride_am, args.stride_ak, jobs.job[0]);
  const Operand b = operand(args.b, args.N, args.stride_bn, args.stride_bk, jobs.job[1]);
  launch_repack<float>(jobs, args.stream);

  const auto map = [](const Operand& of) {
    return tensor_map(of.base, Dtype::fp32, of.lines, of.length, of.pitch, PIECE);
  };
  const bool store_vector = args.N % 4 == 0 && aligned_to_16_bytes(args.out);
  const int tiles = cdiv(args.K, BLOCK_K);
  const Problem problem = {map(a), map(b), a.turned, b.turned, store_vector, args.out, args.M, args.N, tiles};
  allow_shared_memory(matmul_fp32_v12_short_loop_kernel, sizeof(Shared));
  const int64_t grid = cdiv(args.M, BLOCK_M) * cdiv(args.N, BLOCK_N);
  matmul_fp32_v12_short_loop_kernel<<<grid, THREADS, sizeof(Shared), args.stream>>>(problem);
  CUDA_CHECK(cudaGetLastError());
}
