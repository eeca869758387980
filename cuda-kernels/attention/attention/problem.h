// Attention as the copy engine sees it: tensor maps of the operands, and what else a kernel needs to know.
#pragma once

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "args.h"
#include "lib/common.cuh"
#include "lib/head_limits.h"
#include "lib/head_map.h"

struct Problem {
  CUtensorMap q, k, v;  // k and v are empty if there are no keys
  void* out;            // [B, heads, Sq, D]
  float* lse;           // [B, heads, Sq]
  int heads;            // of queries
  int group;            // query heads that share a head of keys
  int Sq, Sk, D;
  int blocks_m;     // tiles of queries of a head
  int first, last;  // query i sees the keys from i + first to i + last
  float factor;     // turns scores into powers of 2; positive
  bool negative;    // the scale is: the kernel flips q's signs
};

// Describes the problem for tiles of block_m queries and block_n keys. Throws std::runtime_error if the copy
// engine cannot take an operand.
inline Problem problem_of(const AttentionArgs& args, int block_m, int block_n) {
  constexpr double LOG2_OF_E = 1.4426950408889634;
  Problem problem = {};
  problem.q = tensor_map_4d("q", args.q, args.dtype, args.B, args.H, args.Sq, args.D, args.q_stride, block_m);
  if (args.Sk > 0) {
    problem.k =
        tensor_map_4d("k", args.k, args.dtype, args.B, args.H_KV, args.Sk, args.D, args.k_stride, block_n);
    problem.v =
        tensor_map_4d("v", args.v, args.dtype, args.B, args.H_KV, args.Sk, args.D, args.v_stride, block_n);
  }
  problem.out = args.out;
  problem.lse = args.lse;
  problem.heads = args.H;
  problem.group = args.H / args.H_KV;
  problem.Sq = args.Sq;
  problem.Sk = args.Sk;
  problem.D = args.D;
  problem.blocks_m = cdiv(args.Sq, block_m);
  // Every key lies between -Sq and Sk of every query, so 32 bits hold what matters of a band.
  problem.first = std::clamp(args.band.first, -args.Sq, args.Sk);
  problem.last = std::clamp(args.band.last, -args.Sq, args.Sk);
  // With a scale of 0 all scores are equal, and a tiny one does the same; 0 would turn a hidden key's -inf
  // into NaN.
  problem.factor = std::max(static_cast<float>(std::fabs(args.scale) * LOG2_OF_E), FLT_MIN);
  problem.negative = args.scale < 0;
  return problem;
}

// Calls function.template operator()<T, WIDTH>() with the C++ type of the dtype and with D padded to whole
// panels of 64 columns.
template <typename Function>
void dispatch_heads(const AttentionArgs& args, Function function) {
  require_narrow_heads(args.D, 128, "v14_dispatch");
  dispatch(args.dtype, [&]<typename T>(T) {
    if constexpr (std::is_same_v<T, float>) {
      throw std::runtime_error("dtype is fp32, must be bf16 or fp16: convert the operands");
    } else {
      args.D <= 64 ? function.template operator()<T, 64>() : function.template operator()<T, 128>();
    }
  });
}
