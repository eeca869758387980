// linear v02_few_rows: matmul_bf16's v18 with bias and activation applied before the sums are rounded.
//
// Change:   where x has few rows, or the layer few outputs, the tiles of matmul_bf16's v18 compute the
//           product: few lines are a tile's columns, and a cluster shares a tile's K. Bias and activation
//           follow once the cluster's sums are added up.
// Why:      a decoder's step gives a layer as many rows as there are sequences. The weight is then read once
//           for a few products, and only memory's bandwidth should limit it.
// Counter:  as matmul_bf16's v18: at few rows time falls, and dram_bytes stay.
// Requires: compute capability 9.0 with its own features (sm_90a); M, N and K below 2^31 - 1024.
// Source:   matmul_bf16's v18.
// Twin:     triton-kernels/matmul/linear/v02_few_rows.py
#include "lib/activation.cuh"
#include "product.h"

void linear_v01_fused(const LinearArgs& args);

struct LinearFewRowsProblem : FewRowsProblem {
  const void* bias;  // [N], of T; or nullptr
  void* pre;         // [M, N], row-major; or nullptr
  Activation activation;
};

template <typename T>
class LinearFewRowsEpilogue {
  const LinearFewRowsProblem& problem;
  float bias[4] = {};

 public:
  __device__ LinearFewRowsEpilogue(const LinearFewRowsProblem& problem, int col) : problem(problem) {
    if (problem.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i < problem.N) bias[i] = to_float(static_cast<const T*>(problem.bias)[col + i]);
    }
  }

  template <typename Store>
  __device__ void apply(float (&sums)[4], Store store) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += bias[i];
    if (problem.pre != nullptr) store(problem.pre);
    with_activation(problem.activation, [&]<Activation ACTIVATION>() {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = activate<ACTIVATION>(sums[i]);
    });
  }
};

// The kernel takes x row-major and weight.T column-major; other operands are repacked.
template <typename T, FewRowsShape SHAPE>
struct LinearFewRowsTile : FewRowsTile<T, SHAPE, true, true> {
  using Problem = LinearFewRowsProblem;
  using Epilogue = LinearFewRowsEpilogue<T>;
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS_PER_SM)
    linear_v02_few_rows_kernel(const __grid_constant__ LinearFewRowsProblem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  few_rows_block<Tile>(problem);
#endif
}

template <typename T>
static void launch_plan(const MatmulBf16Args& product, const LinearFewRowsProblem& problem,
                        const FewRowsPlan& plan) {
  dispatch_few_rows_shape(plan.choice.shape, [&]<FewRowsShape SHAPE>() {
    using Tile = LinearFewRowsTile<T, SHAPE>;
    launch_few_rows<Tile>(linear_v02_few_rows_kernel<Tile>, problem, product, plan.wide, plan.few,
                          plan.choice);
  });
}

// For later steps, which plan a product by themselves.
void linear_v02_few_rows(const LinearArgs& args, const FewRowsPlan& plan) {
  LinearFewRowsProblem problem = {};
  problem.bias = args.bias;
  problem.pre = args.pre;
  problem.activation = args.activation;
  problem.in_fours = reinterpret_cast<uintptr_t>(args.pre) % (4 * size_of(args.dtype)) == 0;
  const MatmulBf16Args product = product_of(args);
  args.dtype == Dtype::bf16 ? launch_plan<__nv_bfloat16>(product, problem, plan)
                            : launch_plan<__half>(product, problem, plan);
}

void linear_v02_few_rows(const LinearArgs& args) {
  if (has_products(args)) {
    const MatmulBf16Args product = product_of(args);
    const Operand x = along_k(describe_a(product), args.M, args.K);
    const Operand weight = along_k(describe_b(product), args.N, args.K);
    const FewRowsDecision decision =
        decide_few_rows(gpu_rates(), modelled(product, x, weight), stored_by_copy_engine(args));
    if (decision.taken) {
      linear_v02_few_rows(args, plan_few_rows(product, x, weight, decision.v18));
      return;
    }
  }
  linear_v01_fused(args);
}
