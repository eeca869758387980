// From a choice of tile to a launch, for matmul_bf16's v19 and linear's v03. Host code.
#pragma once

#include <algorithm>
#include <utility>

#include "few_rows.h"
#include "fitted_choice.h"
#include "launch.cuh"

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
  const GpuRates gpu = gpu_rates();
  const FewRowsProduct product = modelled(args, a, b);
  const FewRowsDecision before = decide_few_rows(gpu, product, plain);
  FittedDecision decision = {
      before.taken ? FittedDecision::V18 : FittedDecision::V15, before.v15, before.v18, {}};
  if (std::min(args.M, args.N) <= FEW || args.out_dtype != args.dtype) return decision;
  double least = before.taken ? before.v18.cycles
                              : rounds_cycles(FITTED, gpu, product, tile_of(before.v15), before.v15.splits);
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
