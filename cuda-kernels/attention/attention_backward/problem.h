// Attention's backward pass as the copy engine sees it: tensor maps of the operands, and what else a kernel
// needs.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "args.h"
#include "lib/common.cuh"
#include "lib/head_limits.h"
#include "lib/head_map.h"
#include "lib/head_products.cuh"

struct BackwardProblem {
  CUtensorMap dout, q, k, v;  // in boxes of TILE_ROWS rows; empty if a tensor is
  const float* lse;           // [B, heads, padded] in powers of 2; inf where a row sees no key or is none
  const float* delta;         // [B, heads, padded]
  void *dq, *dk, *dv;
  int heads;     // of queries
  int kv_heads;  // of keys
  int group;     // query heads that share a head of keys
  int Sq, Sk, D;
  int padded;       // Sq up to whole tiles, or blocks
  int first, last;  // query i sees the keys from i + first to i + last
  float factor;     // turns scores into powers of 2
  float scale;
};

// Without lse and delta, which are computed on the GPU. Throws std::runtime_error if the copy engine cannot
// take an operand.
inline BackwardProblem problem_of(const AttentionBackwardArgs& args, int padded) {
  constexpr double LOG2_OF_E = 1.4426950408889634;
  BackwardProblem problem = {};
  const auto map = [&](const char* name, const void* tensor, int64_t heads, int64_t rows,
                       HeadStrides stride) {
    if (args.B * heads * rows == 0) return CUtensorMap{};
    return tensor_map_4d(name, tensor, args.dtype, args.B, heads, rows, args.D, stride, TILE_ROWS);
  };
  problem.dout = map("dout", args.dout, args.H, args.Sq, args.dout_stride);
  problem.q = map("q", args.q, args.H, args.Sq, args.q_stride);
  problem.k = map("k", args.k, args.H_KV, args.Sk, args.k_stride);
  problem.v = map("v", args.v, args.H_KV, args.Sk, args.v_stride);
  problem.dq = args.dq;
  problem.dk = args.dk;
  problem.dv = args.dv;
  problem.heads = args.H;
  problem.kv_heads = args.H_KV;
  problem.group = args.H / std::max<int64_t>(args.H_KV, 1);
  problem.Sq = args.Sq;
  problem.Sk = args.Sk;
  problem.D = args.D;
  problem.padded = padded;
  // Every key lies between -Sq and Sk of every query, so 32 bits hold what matters of a band.
  problem.first = std::clamp(args.band.first, -args.Sq, args.Sk);
  problem.last = std::clamp(args.band.last, -args.Sq, args.Sk);
  // With a scale of 0 all scores are equal, and a tiny one does the same; 0 would turn a hidden key's inf
  // into NaN.
  const double factor = std::max(std::fabs(args.scale) * LOG2_OF_E, static_cast<double>(FLT_MIN));
  problem.factor = static_cast<float>(std::copysign(factor, args.scale));
  problem.scale = args.scale;
  return problem;
}
