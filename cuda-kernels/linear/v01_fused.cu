// linear v01_fused: matmul_bf16's last step with bias and activation applied before the sums are rounded.
//
// Change:   a tile's sums get their bias and go through the activation in registers. Where the backward pass
//           will need what the activation was applied to, that is stored on the way, as the tile itself is.
// Why:      on its own, an activation reads and writes the whole result once more. In registers it costs
//           instructions alone, and those of one warpgroup run beside the other's products.
// Counter:  dram_bytes of the product alone; instructions rise by those of bias and activation.
// Requires: compute capability 9.0 with its own features (sm_90a); M, N and K below 2^31 - 1024.
// Source:   CUTLASS, "EpilogueWithBroadcast" and its visitor trees, for what an epilogue may hold.
// Twin:     triton-kernels/linear/v01_fused.py
#include "../matmul_bf16/kernel.cuh"
#include "../matmul_bf16/launch.cuh"
#include "activation.cuh"
#include "args.h"

namespace {

struct LinearProblem : MatmulProblem {
  CUtensorMap pre_map;  // empty unless the copy engine can store pre
  void* pre;            // [M, N], row-major; or nullptr
  const void* bias;     // [N]; or nullptr
  Activation activation;
  bool pre_mapped;
};

// What happens to a warpgroup's 64 rows of a tile before they are rounded.
struct LinearEpilogue {
  template <typename Tile, typename Store>
  static __device__ void apply(const LinearProblem& problem, float (&sums)[Tile::SUMS], int row, int col,
                               Store store) {
    if (problem.bias != nullptr) add_bias<Tile>(problem, sums, col);
    if (problem.pre != nullptr) store(Target{&problem.pre_map, problem.pre, problem.pre_mapped});
    with_activation(problem.activation, [&]<Activation ACTIVATION>() {
#pragma unroll
      for (int i = 0; i < Tile::SUMS; ++i) sums[i] = activate<ACTIVATION>(sums[i]);
    });
  }

  template <typename Tile>
  static __device__ void add_bias(const LinearProblem& problem, float (&sums)[Tile::SUMS], int col) {
    using T = typename Tile::T;
    // Of every 8 columns a thread has two neighbours, in one row and in the eighth below.
    const int first_col = col + threadIdx.x % 4 * 2;
    const T* bias = static_cast<const T*>(problem.bias) + first_col;
    const bool pairs = reinterpret_cast<uintptr_t>(bias) % 4 == 0;
#pragma unroll
    for (int i = 0; i < Tile::BLOCK_N / 8; ++i) {
      alignas(4) T pair[2] = {from_float<T>(0.0f), from_float<T>(0.0f)};
      const int64_t left = problem.N - (first_col + i * 8);
      if (pairs && left >= 2) {
        *reinterpret_cast<uint32_t*>(pair) = __ldg(reinterpret_cast<const unsigned*>(bias + i * 8));
      } else {
        if (left >= 1) pair[0] = bias[i * 8];
        if (left >= 2) pair[1] = bias[i * 8 + 1];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i * 4 + j] += to_float(pair[j % 2]);
    }
  }
};

// x is row-major and weight.T column-major: what is not is repacked.
template <typename T, Shape SHAPE>
struct LinearTile : MatmulTile<T, SHAPE.block_m, SHAPE.block_n, SHAPE.cluster, false, true, false> {
  using Problem = LinearProblem;
  using Epilogue = LinearEpilogue;
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::THREADS, 1)
    linear_v01_fused_kernel(const __grid_constant__ LinearProblem problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  matmul_blocks<Tile>(problem);
#endif
}

// Where K is 0, the result is the activation of the bias.
template <typename T>
__global__ void linear_v01_fused_bias_kernel(LinearArgs args) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= args.M * args.N) return;
  const float value = args.bias != nullptr ? to_float(static_cast<const T*>(args.bias)[i % args.N]) : 0.0f;
  if (args.pre != nullptr) static_cast<T*>(args.pre)[i] = from_float<T>(value);
  with_activation(args.activation, [&]<Activation ACTIVATION>() {
    static_cast<T*>(args.out)[i] = from_float<T>(activate<ACTIVATION>(value));
  });
}

// Calls function.operator()<T>() with bf16 or fp16.
template <typename Function>
void dispatch_type(Dtype dtype, Function function) {
  dtype == Dtype::bf16 ? function.template operator()<__nv_bfloat16>()
                       : function.template operator()<__half>();
}

// A matrix of `lines` by K in lines along K; without a base where it must be repacked to be so.
Operand along_k(const void* matrix, const LinearArgs& args, int64_t lines, int64_t stride, int64_t stride_k) {
  const Operand operand = describe_operand(matrix, args.dtype, lines, args.K, stride, stride_k);
  return operand.along_k ? operand : Operand{nullptr, lines, args.K, 0, true};
}

}  // namespace

void linear_v01_fused(const LinearArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  if (args.K == 0) {
    dispatch_type(args.dtype, [&]<typename T>() {
      linear_v01_fused_bias_kernel<T><<<cdiv(args.M * args.N, 256), 256, 0, args.stream>>>(args);
    });
    CUDA_CHECK(cudaGetLastError());
    return;
  }
  if (std::max({args.M, args.N, args.K}) >= LARGEST_SIZE) {
    throw std::runtime_error("x is " + std::to_string(args.M) + " x " + std::to_string(args.K) +
                             " and weight " + std::to_string(args.N) + " x " + std::to_string(args.K) +
                             ", all sizes must be below " + std::to_string(LARGEST_SIZE) +
                             " for this step: call it on slices");
  }
  const MatmulBf16Args product = {.a = args.x,
                                  .b = args.weight,
                                  .out = args.out,
                                  .M = args.M,
                                  .N = args.N,
                                  .K = args.K,
                                  .stride_am = args.stride_xm,
                                  .stride_ak = args.stride_xk,
                                  .stride_bk = args.stride_wk,
                                  .stride_bn = args.stride_wn,
                                  .dtype = args.dtype,
                                  .out_dtype = args.dtype,
                                  .memory = args.memory,
                                  .stream = args.stream};
  Operand x = along_k(args.x, args, args.M, args.stride_xm, args.stride_xk);
  Operand weight = along_k(args.weight, args, args.N, args.stride_wn, args.stride_wk);
  repack_operands(product, x, weight);

  LinearProblem problem = {};
  problem.bias = args.bias;
  problem.activation = args.activation;
  problem.pre = args.pre;
  problem.pre_mapped = args.pre != nullptr && mappable(args.pre, args.dtype, args.M, args.N, args.N);
  if (problem.pre_mapped) problem.pre_map = tensor_map(args.pre, args.dtype, args.M, args.N, args.N, 64);
  const bool aligned = x.pitch % 64 == 0 && weight.pitch % 64 == 0;
  const Choice choice = choose(args.M, args.N, args.K, multiprocessor_count(), false, aligned);
  dispatch_type(args.dtype, [&]<typename T>() {
    dispatch_shape<false>(choice.shape, [&]<Shape SHAPE>() {
      using Tile = LinearTile<T, SHAPE>;
      launch_tile<Tile>(linear_v01_fused_kernel<Tile>, problem, product, x, weight, choice);
    });
  });
}
