// matmul_bf16 v15_dispatch: the tile and the splits of K follow from the sizes; odd sizes are repacked first.
//
// Change:   kernel.cuh is v13's kernel as a template over its tile, and choice.h chooses the tile for each
//           product. Tiles that are left over after full rounds of all SMs are split along K. Operands that
//           the copy engine cannot take are copied to rows that it can. A tile is stored beside the products
//           of the next one, and the kernel is set up while the one before it still runs (programmatic
//           dependent launch).
// Why:      tiles of 128 x 256 leave most of the GPU idle where the result is small or thin, or where the
//           last round has few of them. A copy of an operand moves its bytes twice, which costs far less than
//           loads of single elements in the main loop. The profiled product runs as before, but for its
//           stores beside the next tile's products.
// Counter:  at the profiled product tensor_pipe rises a little, as no warpgroup waits for a store; time falls
//           at small, thin and odd products.
// Requires: compute capability 9.0 with its own features (sm_90a); M, N and K below 2^31 - 1024.
// Source:   Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
//           Multiplication on the GPU" (2023), for splitting what full rounds leave over; CUDA C++
//           Programming Guide, "Programmatic Dependent Launch and Synchronization".
// Twin:     triton-kernels/matmul/matmul_bf16/v15_dispatch.py
#include "kernel.cuh"
#include "launch.cuh"

template <typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    matmul_bf16_v15_dispatch_kernel(const __grid_constant__ MatmulProblem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  matmul_blocks<Tile>(problem);
#endif
}

static void launch_choice(const MatmulBf16Args& args, const Operand& a, const Operand& b, bool plain,
                          const Choice& choice) {
  dispatch_operands(args.dtype, a, b, [&]<typename T, bool A_COL, bool B_COL>() {
    dispatch_shape(choice.shape, plain, [&]<Shape SHAPE, bool PLAIN>() {
      using Tile = MatmulTile<T, SHAPE.block_m, SHAPE.block_n, SHAPE.cluster, A_COL, B_COL, PLAIN>;
      launch_tile<Tile>(matmul_bf16_v15_dispatch_kernel<Tile>, MatmulProblem{}, args, a, b, choice);
    });
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
