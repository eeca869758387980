// linear v03_fitted_tiles: matmul_bf16's v19 with bias and activation applied before the sums are rounded.
//
// Change:   the tiles of matmul_bf16's v19, and its choice, compute the layer's product. A warp holds the
//           bias of a tile's columns however many they are, and reads it by the element, so that an odd
//           layer's bias is not copied.
// Why:      a layer's outputs are seldom a multiple of a tile of 256 columns times the SMs.
// Counter:  as matmul_bf16's v19: where the last round of tiles is fuller, tensor_pipe rises.
// Requires: compute capability 9.0 with its own features (sm_90a); M, N and K below 2^31 - 1024.
// Source:   matmul_bf16's v19.
#include "lib/activation.cuh"
#include "matmul/matmul_bf16/fitted.cuh"
#include "matmul/matmul_bf16/fitted.h"
#include "matmul/matmul_bf16/launch.cuh"
#include "product.h"

void linear_v02_few_rows(const LinearArgs& args, const FewRowsPlan& plan);
void linear_v01_fused(const LinearArgs& args);

struct LinearFittedProblem : FittedProblem {
  CUtensorMap pre_map, pre_rest;  // as out's; empty unless pre_mapped
  void* pre;                      // [M, N], row-major; or nullptr
  const uint16_t* bias;           // [N], of T; or nullptr
  Activation activation;
  bool pre_mapped;  // the tile has PLAIN_OUT
};

template <typename T, int BLOCK_N>
class LinearFittedEpilogue {
  static constexpr int WORDS = cdiv(BLOCK_N, 64);
  uint32_t bias[WORDS];  // pairs of T: the warp has all of the tile's, lane by lane

  // Volatile: the compiler would move the load to its use, after the products.
  __device__ static uint32_t load(const uint16_t* half) {
    uint16_t bits;
    asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(bits) : "l"(half));
    return bits;
  }

 public:
  // Loads the bias while the last products run.
  __device__ void begin(const LinearFittedProblem& problem, int col) {
    const int64_t end = problem.bias == nullptr ? 0 : problem.N;  // of the columns that have a bias
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const int at = col + (i * 32 + threadIdx.x % 32) * 2;
      bias[i] = 0;
      if (at < end) bias[i] = load(problem.bias + at);
      if (at + 1 < end) bias[i] |= load(problem.bias + at + 1) << 16;
    }
  }

  template <int SUMS, typename Store>
  __device__ void apply(const LinearFittedProblem& problem, float (&sums)[SUMS], Store store) {
    if (problem.bias != nullptr) {
      // Of every 8 columns a thread has two neighbours, in one row and in the eighth below.
#pragma unroll
      for (int i = 0; i < BLOCK_N / 8; ++i) {
        const uint32_t word = __shfl_sync(0xffffffff, bias[i / 8], i % 8 * 4 + threadIdx.x % 4);
        alignas(4) T pair[2];
        *reinterpret_cast<uint32_t*>(pair) = word;
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i * 4 + j] += to_float(pair[j % 2]);
      }
    }
    if (problem.pre != nullptr) {
      store(problem.pre_mapped ? &problem.pre_map : nullptr, problem.pre, &problem.pre_rest);
    }
    with_activation(problem.activation, [&]<Activation ACTIVATION>() {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[i] = activate<ACTIVATION>(sums[i]);
    });
  }
};

// The kernel takes x row-major and weight.T column-major; other operands are repacked.
template <typename T, FittedShape SHAPE, bool PLAIN_OUT>
struct LinearFittedTile : FittedTile<T, SHAPE, false, true, PLAIN_OUT> {
  using Problem = LinearFittedProblem;
  using Epilogue = LinearFittedEpilogue<T, SHAPE.block_n>;
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    linear_v03_fitted_tiles_kernel(const __grid_constant__ LinearFittedProblem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  matmul_blocks<Tile>(problem);
#endif
}

template <typename T>
static void launch_choice(const LinearArgs& args, Operand x, Operand weight, bool plain,
                          const Choice& choice) {
  const MatmulBf16Args product = product_of(args);
  repack_operands(product, x, weight);
  LinearFittedProblem problem = {};
  problem.bias = static_cast<const uint16_t*>(args.bias);
  problem.activation = args.activation;
  problem.pre = args.pre;
  dispatch_fitted_shape(choice.shape, plain, [&]<FittedShape SHAPE, bool PLAIN>() {
    using Tile = LinearFittedTile<T, SHAPE, PLAIN>;
    problem.pre_mapped = PLAIN && args.pre != nullptr;
    if (problem.pre_mapped) {
      problem.pre_map = tensor_map(args.pre, args.dtype, args.M, args.N, args.N, 64);
      if constexpr (Tile::REST > 0)
        problem.pre_rest = tensor_map(args.pre, args.dtype, args.M, args.N, args.N, 64, Tile::REST);
    }
    launch_tile<Tile>(linear_v03_fitted_tiles_kernel<Tile>, problem, product, x, weight, choice);
  });
}

void linear_v03_fitted_tiles(const LinearArgs& args) {
  const MatmulBf16Args product = product_of(args);
  if (!has_products(args)) {
    linear_v01_fused(args);
    return;
  }
  const Operand x = along_k(describe_a(product), args.M, args.K);
  const Operand weight = along_k(describe_b(product), args.N, args.K);
  const bool plain = stored_by_copy_engine(args);
  const FittedDecision decision = decide_fitted(product, x, weight, plain);
  switch (decision.step) {
    case FittedDecision::V15:
      return linear_v01_fused(args);
    case FittedDecision::V18:
      return linear_v02_few_rows(args, plan_few_rows(product, x, weight, decision.v18));
    case FittedDecision::V19:
      return args.dtype == Dtype::bf16
                 ? launch_choice<__nv_bfloat16>(args, x, weight, plain, decision.v19.tile)
                 : launch_choice<__half>(args, x, weight, plain, decision.v19.tile);
  }
}
