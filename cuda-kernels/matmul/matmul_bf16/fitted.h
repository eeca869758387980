// From a choice of tile to a launch, for matmul_bf16's v19 and linear's v03. Host code.
#pragma once

#include <algorithm>
#include <utility>

#include "few_rows.h"
#include "fitted_choice.h"
#include "launch.cuh"

// A tensor map of a row-major matrix [rows, cols] without padding, stored in boxes of 64 rows of `box_cols`
// elements of 2 bytes, which are not swizzled.
inline CUtensorMap rest_map(const void* matrix, Dtype dtype, int64_t rows, int64_t cols, int box_cols) {
  static const auto encode = find_encoder();
  const CUtensorMapDataType type =
      dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t size[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t pitch_bytes[] = {static_cast<cuuint64_t>(cols * size_of(dtype))};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_cols), 64};
  const cuuint32_t step[] = {1, 1};
  CUtensorMap map;
  const CUresult error = encode(&map, type, 2, const_cast<void*>(matrix), size, pitch_bytes, box, step,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled refused a result of " + std::to_string(rows) + " x " +
                             std::to_string(cols) + " elements (error " + std::to_string(error) + ")");
  }
  return map;
}

// Which step's tiles should take the least time, and the best of each step.
struct FittedDecision {
  enum { V15, V18, V19 } step;
  Choice v15;
  FewRowsChoice v18;
  FittedChoice v19;
};

// What v18 decides stays, unless another step's tiles should need BETTER_SHARE of its time, or less. v19 has
// no tiles for few lines, nor for an fp32 out. `plain`: the copy engine can store out, and whatever else an
// epilogue stores.
inline FittedDecision decide_fitted(const MatmulBf16Args& args, const Operand& a, const Operand& b,
                                    bool plain) {
  constexpr int FEW = 64;  // lines, which v18's narrow tiles are for
  const FewRowsDecision before = decide_few_rows(args, a, b, plain);
  FittedDecision decision = {
      before.taken ? FittedDecision::V18 : FittedDecision::V15, before.v15, before.v18, {}};
  if (std::min(args.M, args.N) <= FEW || args.out_dtype != args.dtype) return decision;
  const GpuRates gpu = gpu_rates();
  const FewRowsProduct product = modelled(args, a, b);
  const Shape& shape = SHAPES[before.v15.shape];
  double least = before.taken
                     ? before.v18.cycles
                     : fitted_cycles(gpu, product, {shape.block_m, shape.block_n, shape.cluster, true},
                                     before.v15.splits);
  decision.v19 = choose_fitted(gpu, product, plain);
  if (decision.v19.tile.splits > 0 && decision.v19.cycles <= BETTER_SHARE * least) {
    least = decision.v19.cycles;
    decision.step = FittedDecision::V19;
  }
  if (before.v18.blocks > 0 && before.v18.cycles <= BETTER_SHARE * least) decision.step = FittedDecision::V18;
  return decision;
}

// Calls function.operator()<SHAPE, PLAIN>() for the shape of that number. PLAIN: out is plain.
template <typename Function>
void dispatch_fitted_shape(int number, bool plain, Function function) {
  const auto with_shape = [&]<int I>() {
    constexpr FittedShape SHAPE = FITTED_SHAPES[I];
    if (plain) return function.template operator()<SHAPE, true>();
    if constexpr (SHAPE.other) function.template operator()<SHAPE, false>();
  };
  [&]<int... I>(std::integer_sequence<int, I...>) {
    ((number == I ? with_shape.template operator()<I>() : void()), ...);
  }(std::make_integer_sequence<int, std::size(FITTED_SHAPES)>{});
}
