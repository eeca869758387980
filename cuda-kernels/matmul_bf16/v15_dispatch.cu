// matmul_bf16 v15_dispatch: the tile and the splits of K follow from the sizes; odd sizes are repacked first.
//
// Change:   kernel.cuh is v13's kernel as a template of its tile. Here one of its shapes is chosen for each
//           product. Tiles that are left over after whole rounds of all SMs are split along K. Operands that
//           the copy engine cannot take are copied into rows that it can. On the way the kernel has learnt to
//           store a tile beside the next one's products, and to be set up while the kernel before still runs.
// Why:      tiles of 128 x 256 leave most of the chip idle where the result is small or thin, or where the
//           last round has few of them. A copy of an operand moves its bytes twice, which costs less than
//           loads by the element in the main loop, by far.
// Counter:  at the profiled product, tensor_pipe rises a little, as nobody waits for a store. Time, at small,
//           thin and odd products.
// Requires: compute capability 9.0 with its own features (sm_90a); M, N and K below 2^31 - 1024.
// Source:   Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
//           Multiplication on the GPU" (2023), for splitting what whole rounds leave over; CUDA C++
//           Programming Guide, "Programmatic Dependent Launch and Synchronization".
// Twin:     triton-kernels/matmul_bf16/v15_dispatch.py
#include <iterator>
#include <limits>
#include <utility>

#include "../repack.cuh"
#include "kernel.cuh"
#include "operand.h"

template <typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    matmul_bf16_v15_dispatch_kernel(const __grid_constant__ MatmulProblem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  matmul_blocks<Tile>(problem);
#endif
}

// The shapes of tiles that there are, and for which output: plain is stored by the copy engine as T, and
// other may be any, but is stored more slowly.
struct Shape {
  int block_m, block_n, cluster;
  bool plain, other;
};
constexpr Shape SHAPES[] = {
    {128, 256, 2, true, true},  {128, 256, 1, true, false}, {192, 192, 2, false, true},
    {192, 192, 1, false, true}, {128, 192, 2, true, false}, {128, 192, 1, true, false},
    {128, 128, 2, true, false}, {128, 128, 1, true, true},  {64, 256, 1, true, false},
    {128, 64, 1, true, false},  {64, 128, 1, true, true},   {64, 64, 1, true, false},
};

struct Choice {
  int shape;   // of SHAPES
  int whole;   // clusters' tiles that are not split
  int splits;  // of each of the others
};

// The choice that should take the fewest cycles. The model's numbers are rough: from trials on an H100 that
// were not kept. `aligned`: the lines of both operands begin at multiples of 128 bytes; where they do not, L2
// is asked for two lines to deliver one.
Choice choose(int64_t M, int64_t N, int64_t K, int sms, bool plain, bool aligned) {
  constexpr double LINES_A_CYCLE = 58;  // that L2 delivers to all SMs
  constexpr double UNALIGNED_LINES_A_CYCLE = 24;
  constexpr double LEAST_CYCLES = 220;     // of a block of K, however small the tile
  constexpr double TILE_CYCLES = 2000;     // until the first products, and from the last ones on
  constexpr double CLUSTER_CYCLES = 1000;  // until a cluster's blocks have met
  constexpr double SM_BYTES_A_CYCLE = 64;  // of partial sums, to or from L2
  constexpr double L2_BYTES_A_CYCLE = 2640;
  constexpr double DRAM_BYTES_A_CYCLE = 1900;
  constexpr double HIDDEN_SHARE = 0.2;  // of the lesser of two that overlap, is noticed all the same
  constexpr double CLUSTER_128_FACTOR = 1.15;
  constexpr double JOIN_CYCLES = 3000;  // until the last block knows that it is the last
  constexpr int MOST_SPLITS = 16;
  constexpr int LEAST_K_BLOCKS = 4;  // of a split
  const double dram = 2.0 * (M + N) * K / DRAM_BYTES_A_CYCLE;
  const int64_t k_blocks = cdiv(K, BLOCK_K);
  Choice best = {};
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < static_cast<int>(std::size(SHAPES)); ++i) {
    const Shape& shape = SHAPES[i];
    if (!((plain && shape.plain) || shape.other) || shape.cluster > sms) continue;
    const int64_t tiles = cdiv(M, shape.block_m * shape.cluster) * cdiv(N, shape.block_n);  // of clusters
    const int64_t most = sms / shape.cluster;
    const int64_t rounds = tiles / most;  // full ones
    const int64_t left = tiles % most;
    // Over many rounds blocks drift apart, and what they share no longer comes from L2 at the same time.
    if (shape.cluster == 1 && shape.block_m * shape.block_n > 128 * 128 && cdiv(tiles, most) > 2) continue;
    const auto k_cycles = [&](int64_t clusters) {
      const double mma = shape.block_m * shape.block_n / 32.0 *
                         (shape.cluster > 1 && shape.block_n == 128 ? CLUSTER_128_FACTOR : 1.0);
      const double lines = clusters * shape.cluster * (shape.block_m + shape.block_n / shape.cluster);
      return std::max({mma, lines / (aligned ? LINES_A_CYCLE : UNALIGNED_LINES_A_CYCLE), LEAST_CYCLES});
    };
    const double of_rounds = rounds * (k_blocks * k_cycles(most) + TILE_CYCLES);
    // What is left over is split as often as there is room for, or less.
    for (int splits = 1; splits <= MOST_SPLITS; ++splits) {
      if (splits > 1 && (left * splits > most || k_blocks < splits * LEAST_K_BLOCKS)) break;
      double of_left = 0;
      double of_join = 0;
      if (left > 0) of_left = cdiv(k_blocks, splits) * k_cycles(left * splits) + TILE_CYCLES;
      if (left > 0 && splits > 1) {
        // All write their sums, and the last of each tile reads those of all.
        const double bytes = shape.block_m * shape.block_n * 4.0;
        const double readers = left * shape.cluster;
        of_join = JOIN_CYCLES + bytes / std::min(SM_BYTES_A_CYCLE, L2_BYTES_A_CYCLE / (readers * splits)) +
                  splits * bytes / std::min(SM_BYTES_A_CYCLE, L2_BYTES_A_CYCLE / readers);
      }
      const double inside = of_rounds + of_left;
      const double cycles = std::max(inside, dram) + HIDDEN_SHARE * std::min(inside, dram) + of_join +
                            (shape.cluster > 1 ? CLUSTER_CYCLES : 0);
      if (cycles < least) {
        least = cycles;
        best = {i, static_cast<int>(splits == 1 ? tiles : tiles - left), splits};
      }
      if (left == 0) break;
    }
  }
  return best;
}

template <typename Tile>
void launch_tile(const MatmulBf16Args& args, const Operand& a, const Operand& b, const Choice& choice) {
  MatmulProblem problem = {};
  problem.a = operand_map(a, args.dtype, Tile::BLOCK_M);
  problem.b = operand_map(b, args.dtype, Tile::BLOCK_N / Tile::CLUSTER);
  problem.out_matrix = args.out;
  problem.M = args.M;
  problem.N = args.N;
  problem.blocks_m = cdiv(args.M, Tile::BLOCK_M * Tile::CLUSTER);
  problem.blocks_n = cdiv(args.N, Tile::BLOCK_N);
  problem.k_blocks = cdiv(args.K, BLOCK_K);
  const int split_tiles = problem.blocks_m * problem.blocks_n - choice.whole;
  problem.whole = choice.whole;
  problem.splits = choice.splits;
  problem.units = choice.whole + split_tiles * choice.splits;
  problem.out_fp32 = args.out_dtype == Dtype::fp32;
  problem.out_mapped = mappable(args.out, args.out_dtype, args.M, args.N, args.N);
  if (problem.out_mapped) problem.out = tensor_map(args.out, args.out_dtype, args.M, args.N, args.N, 64);
  if (split_tiles > 0) {
    // There are no more split tiles than SMs, so the counters suffice for 680 of them.
    const int64_t blocks = int64_t{split_tiles} * choice.splits * Tile::CLUSTER;
    problem.partials =
        static_cast<float4*>(args.memory->workspace(blocks * Tile::BLOCK_M * Tile::BLOCK_N * sizeof(float)));
    problem.counters = static_cast<unsigned*>(args.memory->zeroed());
  }

  const auto kernel = matmul_bf16_v15_dispatch_kernel<Tile>;
  constexpr int SHARED = sizeof(typename Tile::Shared);
  allow_shared_memory(kernel, SHARED);
  // Whole tiles take their rounds with the fewest clusters that need no more; splits follow full rounds.
  const int64_t most = multiprocessor_count() / Tile::CLUSTER;
  const int64_t clusters = split_tiles > 0 ? std::min<int64_t>(problem.units, most)
                                           : cdiv(problem.units, cdiv(problem.units, most));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {Tile::CLUSTER, 1, 1};
  // The kernel waits by itself for the one before, so it may be set up while that one still runs.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(clusters * Tile::CLUSTER);
  config.blockDim = dim3(Tile::THREADS);
  config.dynamicSmemBytes = SHARED;
  config.stream = args.stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, problem));
}

// Copies operands that the copy engine cannot take into rows that it can, all in one launch.
void repack_operands(const MatmulBf16Args& args, Operand& a, Operand& b) {
  RepackJobs jobs = {};
  const auto repack = [&](Operand& operand, const void* matrix, int64_t stride, int64_t stride_k,
                          RepackJob& job) {
    if (operand.base != nullptr) return;
    constexpr int64_t LINE = BOX_ROW_BYTES / 2;  // elements
    // Whole lines of L2, but for rows that are shorter.
    operand.pitch = operand.length < LINE ? cdiv(operand.length, 8) * 8 : cdiv(operand.length, LINE) * LINE;
    void* to = args.memory->workspace(operand.lines * operand.pitch * size_of(args.dtype));
    operand.base = to;
    job = {matrix,
           to,
           operand.lines,
           operand.length,
           operand.along_k ? stride : stride_k,
           operand.along_k ? stride_k : stride,
           operand.pitch};
  };
  repack(a, args.a, args.stride_am, args.stride_ak, jobs.job[0]);
  repack(b, args.b, args.stride_bn, args.stride_bk, jobs.job[1]);
  launch_repack<uint16_t>(jobs, args.stream);
}

void launch_choice(const MatmulBf16Args& args, const Operand& a, const Operand& b, bool plain,
                   const Choice& choice) {
  const auto with_shape = [&]<int I, typename T, bool A_COL, bool B_COL>() {
    constexpr Shape SHAPE = SHAPES[I];
    if constexpr (SHAPE.plain) {
      if (plain)
        return launch_tile<MatmulTile<T, SHAPE.block_m, SHAPE.block_n, SHAPE.cluster, A_COL, B_COL, true>>(
            args, a, b, choice);
    }
    if constexpr (SHAPE.other) {
      launch_tile<MatmulTile<T, SHAPE.block_m, SHAPE.block_n, SHAPE.cluster, A_COL, B_COL, false>>(args, a, b,
                                                                                                   choice);
    }
  };
  dispatch_operands(args.dtype, a, b, [&]<typename T, bool A_COL, bool B_COL>() {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      ((choice.shape == I ? with_shape.template operator()<I, T, A_COL, B_COL>() : void()), ...);
    }(std::make_integer_sequence<int, std::size(SHAPES)>{});
  });
}

void matmul_bf16_v15_dispatch(const MatmulBf16Args& args) {
  if (no_products(args)) return;
  if (std::max({args.M, args.N, args.K}) >= LARGEST_SIZE) {
    throw std::runtime_error("a and b multiply " + std::to_string(args.M) + " x " + std::to_string(args.K) +
                             " by " + std::to_string(args.K) + " x " + std::to_string(args.N) +
                             ", all sizes must be below " + std::to_string(LARGEST_SIZE) +
                             " for this step: take v05_grouped");
  }
  Operand a = describe_a(args);
  Operand b = describe_b(args);
  repack_operands(args, a, b);
  const bool plain =
      args.out_dtype == args.dtype && mappable(args.out, args.out_dtype, args.M, args.N, args.N);
  const bool aligned = a.pitch % 64 == 0 && b.pitch % 64 == 0;
  launch_choice(args, a, b, plain, choose(args.M, args.N, args.K, multiprocessor_count(), plain, aligned));
}
