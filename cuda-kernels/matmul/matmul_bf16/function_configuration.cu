// matmul_bf16's and linear's choice of a tile in words, for kernel_twins.explain. Host code alone.
#include "configuration.h"
#include "fitted.h"

// Two sizes, as in "64 x 8".
static std::string sizes(int first, int second) {
  return std::to_string(first) + " x " + std::to_string(second);
}

std::string matmul_bf16_configuration(const MatmulBf16Args& args, bool as_linear) {
  Operand a = describe_a(args);
  Operand b = describe_b(args);
  if (as_linear) {
    a = along_k(a, args.M, args.K);
    b = along_k(b, args.N, args.K);
  }
  const bool plain =
      args.out_dtype == args.dtype && mappable(args.out, args.out_dtype, args.M, args.N, args.N);
  const FittedDecision decision = decide_fitted(args, a, b, plain);
  const auto of_clusters = [](const ClusterTile& tile, int splits) {
    std::string told = "tiles of " + sizes(tile.block_m, tile.block_n);
    if (tile.cluster > 1) told += ", clusters of " + std::to_string(tile.cluster);
    if (splits > 1) told += ", the last tiles' K split by " + std::to_string(splits);
    return told;
  };
  std::string told;
  if (decision.step == FittedDecision::V18) {
    const FewRowsShape& shape = FEW_ROWS_SHAPES[decision.v18.shape];
    const int splits = decision.v18.clusters * decision.v18.blocks;
    told = decision.v18.transposed ? "tiles of " + sizes(shape.few, shape.wide) + ", transposed"
                                   : "tiles of " + sizes(shape.wide, shape.few);
    if (splits > 1) {
      told +=
          ", K split by " + std::to_string(splits) + " in clusters of " + std::to_string(decision.v18.blocks);
    }
  } else if (decision.step == FittedDecision::V19) {
    told = of_clusters(FITTED_SHAPES[decision.v19.tile.shape], decision.v19.tile.splits);
  } else {
    told = of_clusters(tile_of(decision.v15), decision.v15.splits);
  }
  const bool repacked = decision.step == FittedDecision::V18 && decision.v18.repacked;
  if (a.base == nullptr || (repacked && decision.v18.transposed)) told += "; the first operand is repacked";
  if (b.base == nullptr || (repacked && !decision.v18.transposed)) told += "; the second operand is repacked";
  return told;
}
