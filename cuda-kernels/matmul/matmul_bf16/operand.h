// A product's operands as the copy engine sees them: tensor maps, whose layouts follow from the strides. Host
// code.
#pragma once

#include <algorithm>
#include <string>

#include "args.h"
#include "lib/common.cuh"
#include "lib/tensor_map.h"

// An operand as lines of contiguous elements: along K, or else along a's M or b's N.
struct Operand {
  const void* base;  // nullptr where the copy engine cannot take the matrix as it is
  int64_t lines, length, pitch;
  bool along_k;
};

// Describes a matrix of `size` (M or N) by K. If the copy engine cannot take it, base is nullptr and pitch 0,
// and lines run along its contiguous dimension, or along K if it has none.
inline Operand describe_operand(const void* matrix, Dtype dtype, int64_t size, int64_t K, int64_t stride,
                                int64_t stride_k) {
  // The pitch of a single line is never used, so it gets a valid value.
  const auto padded = [](int64_t length) { return cdiv(length, 8) * 8; };
  const Operand along = {matrix, size, K, size == 1 ? padded(K) : stride, true};
  const Operand across = {matrix, K, size, K == 1 ? padded(size) : stride_k, false};
  const bool neighbours_along = stride_k == 1 || K == 1;
  const bool neighbours_across = stride == 1 || size == 1;
  for (const Operand& as : {along, across}) {
    if ((as.along_k ? neighbours_along : neighbours_across) &&
        mappable(as.base, dtype, as.lines, as.length, as.pitch)) {
      return as;
    }
  }
  if (neighbours_across && (!neighbours_along || K == 1)) return {nullptr, K, size, 0, false};
  return {nullptr, size, K, 0, true};
}

inline Operand describe_a(const MatmulBf16Args& args) {
  return describe_operand(args.a, args.dtype, args.M, args.K, args.stride_am, args.stride_ak);
}

inline Operand describe_b(const MatmulBf16Args& args) {
  return describe_operand(args.b, args.dtype, args.N, args.K, args.stride_bn, args.stride_bk);
}

// For steps that need the copy engine: std::runtime_error where it cannot take a matrix.
inline Operand require_operand(const char* name, const Operand& operand, const void* matrix, int64_t rows,
                               int64_t cols, int64_t stride_row, int64_t stride_col) {
  if (operand.base != nullptr) return operand;
  const std::string is = std::string(name) + " is " + std::to_string(rows) + " x " + std::to_string(cols);
  if (std::max(rows, cols) >= LARGEST_SIZE) {
    throw std::runtime_error(is + ", must be below " + std::to_string(LARGEST_SIZE) +
                             " either way for this step: take v05_grouped");
  }
  throw std::runtime_error(
      is + " with strides " + std::to_string(stride_row) + " and " + std::to_string(stride_col) +
      " and starts " + std::to_string(reinterpret_cast<uintptr_t>(matrix) % 16) +
      " bytes past a multiple of 16; this step takes neighbours along rows or along columns, which start at "
      "multiples of 16 bytes, a multiple of 8 elements apart, and do not overlap: repack it, by "
      ".contiguous() if its rows have a multiple of 8 elements, else into padded rows, or take v15_dispatch");
}

inline Operand require_a(const MatmulBf16Args& args) {
  return require_operand("a", describe_a(args), args.a, args.M, args.K, args.stride_am, args.stride_ak);
}

inline Operand require_b(const MatmulBf16Args& args) {
  return require_operand("b", describe_b(args), args.b, args.K, args.N, args.stride_bk, args.stride_bn);
}

// A map of an operand that is copied in boxes of 64 elements of `lines` lines along K, or of 64 lines across
// it, as one piece of a wgmma_tile.
inline CUtensorMap operand_map(const Operand& operand, Dtype dtype, int lines) {
  return tensor_map(operand.base, dtype, operand.lines, operand.length, operand.pitch,
                    operand.along_k ? lines : 64);
}

// Calls function.operator()<T, A_COL, B_COL>() for these operands: A_COL says that a is column-major, B_COL
// that b is.
template <typename Function>
void dispatch_operands(Dtype dtype, const Operand& a, const Operand& b, Function function) {
  const auto with_type = [&]<typename T>() {
    if (a.along_k) {
      b.along_k ? function.template operator()<T, false, true>()
                : function.template operator()<T, false, false>();
    } else {
      b.along_k ? function.template operator()<T, true, true>()
                : function.template operator()<T, true, false>();
    }
  };
  if (dtype == Dtype::bf16) {
    with_type.template operator()<__nv_bfloat16>();
  } else {
    with_type.template operator()<__half>();
  }
}

// Whether there is nothing to multiply; where K = 0, out becomes zero.
inline bool no_products(const MatmulBf16Args& args) {
  if (args.M == 0 || args.N == 0) return true;
  if (args.K > 0) return false;
  CUDA_CHECK(cudaMemsetAsync(args.out, 0, args.M * args.N * size_of(args.out_dtype), args.stream));
  return true;
}
