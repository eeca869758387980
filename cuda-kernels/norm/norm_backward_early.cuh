// The launch that adds partial column sums, set up while the kernel before it ends: of the kernels behind the
// norms' dispatching backward steps. Terms: docs/glossary.md.
#pragma once

#include "lib/early.cuh"
#include "norm_backward.cuh"

// As launch_with_sums, but with programmatic dependent launch: sum_kernel is set up while the kernel before
// it ends, which must call allow_dependent_launch.
template <typename T, typename Launch>
void launch_with_early_sums(const NormBackwardArgs& args, int groups, bool centered, Launch launch,
                            void (*sum_kernel)(const float*, int, int64_t, T*, T*)) {
  const int outputs = centered ? 2 : 1;
  float* const workspace = workspace_of(args, groups, outputs);
  launch(workspace);
  if (!wants_sums(args)) return;
  const dim3 grid(static_cast<unsigned>(cdiv(args.N, SUM_COLUMNS)), outputs);
  launch_early(grid, std::min<int64_t>(cdiv(groups, SUM_BATCH), MOST_SUM_WARPS) * 32, args.stream, sum_kernel,
               static_cast<const float*>(workspace), groups, args.N, static_cast<T*>(args.dweight),
               static_cast<T*>(args.dbias));
}
