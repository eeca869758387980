// What sets kernels of the norms apart, and the statistics of a row. Terms: docs/glossary.md.
#pragma once

#include "lib/alignment.h"
#include "norm_forward_args.h"
#include "norm_kind.h"

enum class Residual { NONE, ADDED };

// 1 / sqrt(variance + eps) of a row of N elements; `squares` is the sum of their squared distances from the
// mean, which is 0 for rms_norm.
__device__ inline float rstd_of(float squares, int64_t N, float eps) {
  return rsqrtf(squares / static_cast<float>(N) + eps);
}
