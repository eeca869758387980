// linear v01_fused: matmul_bf16's last step with bias and activation applied before the sums are rounded.
//
// Change:   in the epilogue, a tile's sums get their bias and go through the activation in registers. If the
//           backward pass will need the activation's argument, it is stored on the way, as the tile itself
//           is.
// Why:      on its own, an activation reads and writes the whole result once more. In registers it costs
//           instructions alone.
// Counter:  dram_bytes of the product alone; instructions rise by those of bias and activation.
// Requires: compute capability 9.0 with its own features (sm_90a); M, N and K below 2^31 - 1024.
// Source:   CUTLASS, "EpilogueWithBroadcast" and its visitor trees, for what an epilogue may hold.
// Twin:     triton-kernels/matmul/linear/v01_fused.py
#include "args.h"
#include "lib/activation.cuh"
#include "matmul/matmul_bf16/kernel.cuh"
#include "matmul/matmul_bf16/launch.cuh"

struct LinearProblem : MatmulProblem {
  CUtensorMap pre_map;   // empty unless pre_mapped
  void* pre;             // [M, N], row-major; or nullptr
  const uint16_t* bias;  // [N], of T, in words: of even length, and aligned; or nullptr
  Activation activation;
  bool pre_mapped;  // the copy engine can store pre
};

template <typename T, int BLOCK_N>
class LinearEpilogue {
  uint32_t bias[BLOCK_N / 64];  // pairs of T: the warp has all of the tile's, lane by lane

 public:
  // Loads the bias while the last products run.
  __device__ void begin(const LinearProblem& problem, int col) {
    if (problem.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < BLOCK_N / 64; ++i) {
      const int at = col + (i * 32 + threadIdx.x % 32) * 2;
      bias[i] = 0;
      // Volatile: the compiler would move the load to its use, after the products.
      if (at < problem.N) asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(bias[i]) : "l"(problem.bias + at));
    }
  }

  template <int SUMS, typename Store>
  __device__ void apply(const LinearProblem& problem, float (&sums)[SUMS], Store store) {
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
    if (problem.pre != nullptr) store(problem.pre_mapped ? &problem.pre_map : nullptr, problem.pre);
    with_activation(problem.activation, [&]<Activation ACTIVATION>() {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[i] = activate<ACTIVATION>(sums[i]);
    });
  }
};

// The kernel takes x row-major and weight.T column-major; other operands are repacked.
template <typename T, Shape SHAPE, bool PLAIN_OUT>
struct LinearTile : MatmulTile<T, SHAPE.block_m, SHAPE.block_n, SHAPE.cluster, false, true, PLAIN_OUT> {
  using Problem = LinearProblem;
  using Epilogue = LinearEpilogue<T, SHAPE.block_n>;
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
static void dispatch_type(Dtype dtype, Function function) {
  dtype == Dtype::bf16 ? function.template operator()<__nv_bfloat16>()
                       : function.template operator()<__half>();
}

// Describes a matrix of `lines` by K in lines along K; base is nullptr if it must be repacked for that.
static Operand along_k(const void* matrix, const LinearArgs& args, int64_t lines, int64_t stride,
                       int64_t stride_k) {
  const Operand operand = describe_operand(matrix, args.dtype, lines, args.K, stride, stride_k);
  return operand.along_k ? operand : Operand{nullptr, lines, args.K, 0, true};
}

// The bias at an address from which whole words can be read.
static const uint16_t* in_words(const LinearArgs& args) {
  const auto* bias = static_cast<const uint16_t*>(args.bias);
  if (bias == nullptr || (args.N % 2 == 0 && reinterpret_cast<uintptr_t>(bias) % 4 == 0)) return bias;
  auto* copy = static_cast<uint16_t*>(args.memory->workspace((args.N + 1) * sizeof(uint16_t)));
  CUDA_CHECK(cudaMemcpyAsync(copy, bias, args.N * sizeof(uint16_t), cudaMemcpyDeviceToDevice, args.stream));
  return copy;
}

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
  problem.bias = in_words(args);
  problem.activation = args.activation;
  problem.pre = args.pre;
  problem.pre_mapped = args.pre != nullptr && mappable(args.pre, args.dtype, args.M, args.N, args.N);
  if (problem.pre_mapped) problem.pre_map = tensor_map(args.pre, args.dtype, args.M, args.N, args.N, 64);
  const bool plain =
      mappable(args.out, args.dtype, args.M, args.N, args.N) && (args.pre == nullptr || problem.pre_mapped);
  const bool aligned = x.pitch % 64 == 0 && weight.pitch % 64 == 0;
  const Choice choice = choose(args.M, args.N, args.K, multiprocessor_count(), plain, aligned);
  dispatch_type(args.dtype, [&]<typename T>() {
    dispatch_shape(choice.shape, plain, [&]<Shape SHAPE, bool PLAIN>() {
      using Tile = LinearTile<T, SHAPE, PLAIN>;
      launch_tile<Tile>(linear_v01_fused_kernel<Tile>, problem, product, x, weight, choice);
    });
  });
}
