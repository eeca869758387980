// linear as a product, for the steps that choose a tile for it. Host code.
#pragma once

#include "args.h"
#include "matmul/matmul_bf16/few_rows.h"

// x @ weight.T, without bias and activation.
inline MatmulBf16Args product_of(const LinearArgs& args) {
  return {.a = args.x,
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
}

// Whether there are products, of sizes that the copy engine counts.
inline bool has_products(const LinearArgs& args) {
  return std::min({args.M, args.N, args.K}) > 0 && std::max({args.M, args.N, args.K}) < LARGEST_SIZE;
}

// The copy engine can store all that the epilogue stores.
inline bool stored_by_copy_engine(const LinearArgs& args) {
  return mappable(args.out, args.dtype, args.M, args.N, args.N) &&
         (args.pre == nullptr || mappable(args.pre, args.dtype, args.M, args.N, args.N));
}
