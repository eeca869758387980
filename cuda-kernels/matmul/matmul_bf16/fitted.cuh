// The tiles of matmul_bf16's v19 and of linear's v03. Terms: docs/glossary.md.
#pragma once

#include "fitted_choice.h"
#include "kernel.cuh"

// The kernel's argument, by value.
struct FittedProblem : MatmulProblem {
  // out in boxes of a tile's narrower last piece; empty unless the tile has one, and PLAIN_OUT.
  CUtensorMap out_rest;
};

template <typename T, FittedShape SHAPE, bool A_COL, bool B_COL, bool PLAIN_OUT>
struct FittedTile : MatmulTile<T, SHAPE.block_m, SHAPE.block_n, SHAPE.cluster, A_COL, B_COL, PLAIN_OUT> {
  using Problem = FittedProblem;
};
