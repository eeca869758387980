// matmul_bf16 v18_few_rows: few rows or columns become a tile's columns, and a cluster shares a tile's K.
//
// Change:   the operands change places where a has few rows, so that the many columns of b are a tile's rows,
//           and the few lines, 8 to 256 of them, its columns. The blocks that split a tile's K are a cluster:
//           each adds up its share of the tile's rows from the others' shared memory. few_rows_choice.h
//           weighs these tiles against v15's, and hands over to v15 where those should take less time.
// Why:      of a tile of 64 rows, 8 rows of a use an eighth, and what the tile sets up, loads and stores does
//           not shrink with them. Splits that meet in global memory wait for it three times: to write, to be
//           counted, and to be read by one block alone. A cluster's blocks wait for one barrier, and all of
//           them add.
// Counter:  at the profiled product, 16 x 14336 x 4096, time falls; dram_bytes stays, since each operand is
//           read once by either step.
// Requires: compute capability 9.0 with its own features (sm_90a); M, N and K below 2^31 - 1024.
// Source:   CUTLASS, "Efficient GEMM in CUDA", for split-K and operands that change places; CUDA C++
//           Programming Guide, "Distributed Shared Memory".
// Twin:     triton-kernels/matmul/matmul_bf16/v18_few_rows.py
#include <algorithm>

#include "few_rows.h"

void matmul_bf16_v15_dispatch(const MatmulBf16Args& args);

template <typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS_PER_SM)
    matmul_bf16_v18_few_rows_kernel(const __grid_constant__ FewRowsProblem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  few_rows_block<Tile>(problem);
#endif
}

// For later steps, which plan a product by themselves.
void matmul_bf16_v18_few_rows(const MatmulBf16Args& args, const FewRowsPlan& plan) {
  dispatch_operands(args.dtype, plan.wide, plan.few, [&]<typename T, bool WIDE_COL, bool FEW_ALONG_K>() {
    dispatch_few_rows_shape(plan.choice.shape, [&]<FewRowsShape SHAPE>() {
      if constexpr (FEW_ALONG_K || SHAPE.few > 64) {
        using Tile = FewRowsTile<T, SHAPE, !WIDE_COL, FEW_ALONG_K>;
        launch_few_rows<Tile>(matmul_bf16_v18_few_rows_kernel<Tile>, FewRowsProblem{}, args, plan.wide,
                              plan.few, plan.choice);
      }
    });
  });
}

void matmul_bf16_v18_few_rows(const MatmulBf16Args& args) {
  const bool plain =
      args.out_dtype == args.dtype && mappable(args.out, args.out_dtype, args.M, args.N, args.N);
  if (std::min({args.M, args.N, args.K}) > 0 && std::max({args.M, args.N, args.K}) < LARGEST_SIZE) {
    const Operand a = describe_a(args);
    const Operand b = describe_b(args);
    const FewRowsDecision decision = decide_few_rows(gpu_rates(), modelled(args, a, b), plain);
    if (decision.taken) {
      matmul_bf16_v18_few_rows(args, plan_few_rows(args, a, b, decision.v18));
      return;
    }
  }
  matmul_bf16_v15_dispatch(args);
}
