// From a choice of tile to a launch, for matmul_bf16's v15 and v19, and linear's v01 and v03. Host code.
#pragma once

#include <algorithm>
#include <utility>

#include "args.h"
#include "choice.h"
#include "lib/ptx/hopper.cuh"
#include "lib/repack.cuh"
#include "operand.h"

// Launches a kernel that computes tiles of type Tile. Fills in the fields of `problem` that describe the
// product; a kernel's own further fields are the caller's.
template <typename Tile, typename Problem>
void launch_tile(void (*kernel)(Problem), Problem problem, const MatmulBf16Args& args, const Operand& a,
                 const Operand& b, const Choice& choice) {
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
  if constexpr (Tile::PLAIN_OUT && Tile::REST > 0)
    problem.out_rest = tensor_map(args.out, args.out_dtype, args.M, args.N, args.N, 64, Tile::REST);
  if (split_tiles > 0) {
    // At most as many tiles are split as there are SMs, so the counters suffice for 680 SMs.
    const int64_t blocks = int64_t{split_tiles} * choice.splits * Tile::CLUSTER;
    problem.partials =
        static_cast<float4*>(args.memory->workspace(blocks * Tile::BLOCK_M * Tile::BLOCK_N * sizeof(float)));
    problem.counters = static_cast<unsigned*>(args.memory->zeroed());
  }

  constexpr int SHARED = sizeof(typename Tile::Shared);
  allow_shared_memory(kernel, SHARED);
  // Whole tiles alone: the fewest clusters that need no more rounds. With split tiles: all clusters, since
  // these follow full rounds.
  const int64_t most = multiprocessor_count() / Tile::CLUSTER;
  const int64_t clusters = split_tiles > 0 ? std::min<int64_t>(problem.units, most)
                                           : cdiv(problem.units, cdiv(problem.units, most));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {Tile::CLUSTER, 1, 1};
  // Programmatic dependent launch: the kernel itself waits for the one before, so it may be set up while that
  // one runs.
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

// The pitch of an operand's copy, in elements: whole lines, but for rows shorter than a line.
inline int64_t repacked_pitch(int64_t length) {
  constexpr int64_t LINE = BOX_ROW_BYTES / 2;
  return length < LINE ? cdiv(length, 8) * 8 : cdiv(length, LINE) * LINE;
}

// Copies operands that the copy engine cannot take into rows that it can, all in one launch.
inline void repack_operands(const MatmulBf16Args& args, Operand& a, Operand& b) {
  RepackJobs jobs = {};
  const auto repack = [&](Operand& operand, const void* matrix, int64_t stride, int64_t stride_k,
                          RepackJob& job) {
    if (operand.base != nullptr) return;
    operand.pitch = repacked_pitch(operand.length);
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

// Calls function.operator()<SHAPE, PLAIN>() for the shape of that number. PLAIN: out is plain, and the shape
// is compiled for plain output.
template <typename Function>
void dispatch_shape(int number, bool plain, Function function) {
  const auto with_shape = [&]<int I>() {
    constexpr Shape SHAPE = SHAPES[I];
    if constexpr (SHAPE.plain) {
      if (plain) return function.template operator()<SHAPE, true>();
    }
    if constexpr (SHAPE.other) function.template operator()<SHAPE, false>();
  };
  [&]<int... I>(std::integer_sequence<int, I...>) {
    ((number == I ? with_shape.template operator()<I>() : void()), ...);
  }(std::make_integer_sequence<int, std::size(SHAPES)>{});
}
