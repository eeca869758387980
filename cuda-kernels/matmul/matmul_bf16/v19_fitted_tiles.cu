// matmul_bf16 v19_fitted_tiles: tiles of 160, 176 and 224 columns, and a choice that was fitted to trials.
//
// Change:   v15's kernel gets tiles of 160, 176 and 224 columns, which are no multiples of 64. The last
//           columns of such a tile are a narrower piece in shared memory, with a box of their own.
//           fitted_choice.h has one model for these tiles and most of v15's, whose numbers follow from trials
//           of every tile at drawn products. v18's decision stays where it should take as little time.
// Why:      a GPU of 132 SMs computes 132 tiles at once. Where a result has 1.1 times as many, a second round
//           runs nearly empty; each further width of a tile is one more chance that the last round is full.
//           And v15's rough numbers take tiles that are too large for small products.
// Counter:  at the profiled product, 1024 x 5120 x 4096, tensor_pipe rises: two rounds of 128 x 160, the
//           second nearly full, replace two of 128 x 192, of which the second is two thirds full.
// Requires: compute capability 9.0 with its own features (sm_90a); M, N and K below 2^31 - 1024.
// Source:   PTX ISA, "wgmma.mma_async", for the shapes; CUTLASS, "Efficient GEMM in CUDA", for rounds of
//           tiles and the last of them.
#include <algorithm>

#include "fitted.cuh"
#include "fitted.h"
#include "launch.cuh"

void matmul_bf16_v15_dispatch(const MatmulBf16Args& args);
void matmul_bf16_v18_few_rows(const MatmulBf16Args& args, const FewRowsPlan& plan);

template <typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    matmul_bf16_v19_fitted_tiles_kernel(const __grid_constant__ FittedProblem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  matmul_blocks<Tile>(problem);
#endif
}

static void launch_choice(const MatmulBf16Args& args, Operand a, Operand b, bool plain,
                          const Choice& choice) {
  repack_operands(args, a, b);
  dispatch_operands(args.dtype, a, b, [&]<typename T, bool A_COL, bool B_COL>() {
    dispatch_fitted_shape(choice.shape, plain, [&]<FittedShape SHAPE, bool PLAIN>() {
      using Tile = FittedTile<T, SHAPE, A_COL, B_COL, PLAIN>;
      launch_tile<Tile>(matmul_bf16_v19_fitted_tiles_kernel<Tile>, FittedProblem{}, args, a, b, choice);
    });
  });
}

void matmul_bf16_v19_fitted_tiles(const MatmulBf16Args& args) {
  if (std::min({args.M, args.N, args.K}) == 0 || std::max({args.M, args.N, args.K}) >= LARGEST_SIZE) {
    matmul_bf16_v15_dispatch(args);
    return;
  }
  const Operand a = describe_a(args);
  const Operand b = describe_b(args);
  const bool plain =
      args.out_dtype == args.dtype && mappable(args.out, args.out_dtype, args.M, args.N, args.N);
  const FittedDecision decision = decide_fitted(args, a, b, plain);
  switch (decision.step) {
    case FittedDecision::V15:
      return matmul_bf16_v15_dispatch(args);
    case FittedDecision::V18:
      return matmul_bf16_v18_few_rows(args, plan_few_rows(args, a, b, decision.v18));
    case FittedDecision::V19:
      return launch_choice(args, a, b, plain, decision.v19.tile);
  }
}
