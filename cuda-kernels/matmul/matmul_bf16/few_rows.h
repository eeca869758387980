// From a choice of tile to a launch, for matmul_bf16's v18 and linear's v02. Host code.
#pragma once

#include <utility>

#include "args.h"
#include "few_rows.cuh"
#include "few_rows_choice.h"
#include "launch.cuh"
#include "operand.h"

// Launches a kernel that computes tiles of type Tile. Fills in the fields of `problem` that describe the
// product; a kernel's own further fields are the caller's.
template <typename Tile, typename Problem>
void launch_few_rows(void (*kernel)(Problem), Problem problem, const MatmulBf16Args& args,
                     const Operand& wide, const Operand& few, const FewRowsChoice& choice) {
  problem.wide = operand_map(wide, args.dtype, Tile::BLOCK_WIDE);
  problem.few = operand_map(few, args.dtype, Tile::BLOCK_FEW);
  problem.out = args.out;
  problem.M = static_cast<int>(args.M);
  problem.N = static_cast<int>(args.N);
  problem.few_tiles = cdiv(choice.transposed ? args.M : args.N, Tile::BLOCK_FEW);
  problem.k_blocks = cdiv(args.K, BLOCK_K);
  problem.clusters = choice.clusters;
  problem.blocks = choice.blocks;
  problem.transposed = choice.transposed;
  problem.out_fp32 = args.out_dtype == Dtype::fp32;
  problem.in_fours = problem.in_fours && args.N % 4 == 0 &&
                     reinterpret_cast<uintptr_t>(args.out) % (4 * size_of(args.out_dtype)) == 0;
  const int64_t tiles = cdiv(choice.transposed ? args.N : args.M, Tile::BLOCK_WIDE) * problem.few_tiles;
  if (choice.clusters > 1) {
    // A split product has at most two blocks an SM, and a tile two clusters at least, so the counters suffice
    // for 2048 SMs.
    problem.partials = static_cast<float4*>(
        args.memory->workspace(tiles * choice.clusters * Tile::BLOCK_WIDE * Tile::BLOCK_FEW * sizeof(float)));
    problem.counters = static_cast<unsigned*>(args.memory->zeroed());
  }

  constexpr int SHARED = sizeof(typename Tile::Shared);
  allow_shared_memory(kernel, SHARED);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(choice.blocks), 1, 1};
  // Programmatic dependent launch: the kernel itself waits for the one before, so it may be set up while that
  // one runs.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(tiles * choice.clusters * choice.blocks);
  config.blockDim = dim3(Tile::THREADS);
  config.dynamicSmemBytes = SHARED;
  config.stream = args.stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, problem));
}

// Copies few lines to lines along K, whatever their strides: to: [lines, pitch]. A thread copies one element
// of every line, so that all of them are on their way at once.
template <typename Word>
__global__ void along_k_kernel(const Word* from, Word* to, int lines, int K, int64_t stride, int64_t stride_k,
                               int64_t pitch) {
  allow_dependent_launch();
  const int k = blockIdx.x * blockDim.x + threadIdx.x;
  if (k >= K) return;
#pragma unroll 8
  for (int line = 0; line < lines; ++line) to[line * pitch + k] = from[line * stride + k * stride_k];
}

// An operand that is read along K; base is nullptr if it must be repacked for that.
inline Operand along_k(const Operand& operand, int64_t lines, int64_t K) {
  return operand.along_k ? operand : Operand{nullptr, lines, K, 0, true};
}

// What v18 computes of a product: its operands, repacked where they must be, and the choice.
struct FewRowsPlan {
  Operand wide, few;
  FewRowsChoice choice;
};

// Which of both steps' tiles should take less time, and the better one of each.
struct FewRowsDecision {
  bool taken;  // v18's, else v15's
  FewRowsChoice v18;
  Choice v15;
};

// A product as the model sees it: operands as they are after a repack.
inline FewRowsProduct modelled(const MatmulBf16Args& args, const Operand& a, const Operand& b) {
  const auto pitch = [](const Operand& operand) {
    return operand.base != nullptr ? operand.pitch : repacked_pitch(operand.length);
  };
  return {args.M, args.N, args.K, pitch(a), pitch(b), a.along_k, b.along_k};
}

// `plain`: as for v15's choice.
inline FewRowsDecision decide_few_rows(const GpuRates& gpu, const FewRowsProduct& product, bool plain) {
  const FewRowsChoice v18 = choose_few_rows(gpu, product);
  const Choice v15 = choose(product.M, product.N, product.K, gpu.sms, plain,
                            in_whole_lines(product.a_pitch) && in_whole_lines(product.b_pitch));
  const bool better = v18.blocks > 0 && v18.cycles <= BETTER_SHARE * v15_cycles(gpu, product, v15);
  return {better, v18, v15};
}

// Plans a product, and repacks its operands.
inline FewRowsPlan plan_few_rows(const MatmulBf16Args& args, Operand a, Operand b,
                                 const FewRowsChoice& choice) {
  Operand& few = choice.transposed ? a : b;
  if (choice.repacked) {
    const int64_t lines = choice.transposed ? args.M : args.N;
    const int64_t pitch = cdiv(args.K, 64) * 64;
    void* to = args.memory->workspace(lines * pitch * size_of(args.dtype));
    along_k_kernel<uint16_t><<<cdiv(args.K, 64), 64, 0, args.stream>>>(
        static_cast<const uint16_t*>(choice.transposed ? args.a : args.b), static_cast<uint16_t*>(to),
        static_cast<int>(lines), static_cast<int>(args.K),
        choice.transposed ? args.stride_am : args.stride_bn,
        choice.transposed ? args.stride_ak : args.stride_bk, pitch);
    CUDA_CHECK(cudaGetLastError());
    few = {to, lines, args.K, pitch, true};
  }
  repack_operands(args, a, b);
  return choice.transposed ? FewRowsPlan{b, a, choice} : FewRowsPlan{a, b, choice};
}

// Calls function.operator()<SHAPE>() for the shape of that number.
template <typename Function>
void dispatch_few_rows_shape(int number, Function function) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    ((number == I ? function.template operator()<FEW_ROWS_SHAPES[I]>() : void()), ...);
  }(std::make_integer_sequence<int, std::size(FEW_ROWS_SHAPES)>{});
}
