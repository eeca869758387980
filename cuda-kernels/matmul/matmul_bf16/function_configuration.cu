// matmul_bf16's and linear's choice of a tile in words, for kernel_twins.explain. Host code alone.
#include "configuration.h"
#include "few_rows.h"

// Two sizes, as in "64 x 8".
static std::string sizes(int first, int second) {
  return std::to_string(first) + " x " + std::to_string(second);
}

std::string matmul_bf16_configuration(const MatmulBf16Args& args, bool along_k) {
  Operand a = describe_a(args);
  Operand b = describe_b(args);
  if (along_k && !a.along_k) a = {nullptr, args.M, args.K, 0, true};
  if (along_k && !b.along_k) b = {nullptr, args.N, args.K, 0, true};
  const bool plain =
      args.out_dtype == args.dtype && mappable(args.out, args.out_dtype, args.M, args.N, args.N);
  const FewRowsDecision decision = decide_few_rows(args, a, b, plain);
  std::string told;
  if (decision.taken) {
    const FewRowsShape& shape = FEW_ROWS_SHAPES[decision.v18.shape];
    const int splits = decision.v18.clusters * decision.v18.blocks;
    told = decision.v18.transposed ? "tiles of " + sizes(shape.few, shape.wide) + ", transposed"
                                   : "tiles of " + sizes(shape.wide, shape.few);
    if (splits > 1) {
      told +=
          ", K split by " + std::to_string(splits) + " in clusters of " + std::to_string(decision.v18.blocks);
    }
  } else {
    const Shape& shape = SHAPES[decision.v15.shape];
    told = "tiles of " + sizes(shape.block_m, shape.block_n);
    if (shape.cluster > 1) told += ", clusters of " + std::to_string(shape.cluster);
    if (decision.v15.splits > 1)
      told += ", the last tiles' K split by " + std::to_string(decision.v15.splits);
  }
  const bool few_across = decision.taken && FEW_ROWS_SHAPES[decision.v18.shape].few <= 64 &&
                          !(decision.v18.transposed ? a : b).along_k;
  if (a.base == nullptr || (few_across && decision.v18.transposed)) told += "; the first operand is repacked";
  if (b.base == nullptr || (few_across && !decision.v18.transposed))
    told += "; the second operand is repacked";
  return told;
}
