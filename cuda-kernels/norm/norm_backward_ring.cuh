// The launch of norm_backward_ahead.cuh's kernel: how rows are split and grouped. Terms: docs/glossary.md.
#pragma once

#include "norm_backward_ahead.cuh"

// Whether rows with the same index have the same skew in x, dout, dadded and dx.
template <typename T>
bool are_alike(const NormBackwardArgs& args) {
  const auto like_x = [&](const void* rows, int64_t stride) {
    return (reinterpret_cast<uintptr_t>(rows) - reinterpret_cast<uintptr_t>(args.x)) % 16 == 0 &&
           (stride - args.stride_xm) % Pack<T>::SIZE == 0;
  };
  return like_x(args.dout, args.stride_dm) && like_x(args.dx, args.N) &&
         (!args.dadded || like_x(args.dadded, args.stride_am));
}

// The smallest cluster whose threads hold FEW_PACKS of a row. Threads hold MANY_PACKS in the largest cluster,
// and also in clusters whose rows have several skews: the number of groups is rounded to a multiple of the
// period, and the fewer threads a block has, the more clusters run, and the less rounding costs. `blocks` is
// 0 if rows are too long.
template <typename T>
AheadShape ahead_shape(const NormBackwardArgs& args) {
  const bool alike = are_alike<T>(args);
  const int64_t packs = alike ? packs_of<T>(args) : cdiv(args.N, Pack<T>::SIZE);
  const int matrices = args.dadded ? 3 : 2;
  const int more = alike ? 0 : 1;  // packs that a part of dx may touch beside its own
  int blocks = 1;
  while (blocks < MOST_CLUSTER_BLOCKS && packs > blocks * (FEW_PACKS * BACKWARD_AHEAD_THREADS - more))
    blocks *= 2;
  const int64_t each = cdiv(packs, blocks);
  if (each + more > MANY_PACKS * BACKWARD_AHEAD_THREADS) return {};
  const bool many =
      blocks == MOST_CLUSTER_BLOCKS || (alike && blocks > 1 && skew_period<T>(args.stride_xm) > 1);
  const int of_thread = many ? MANY_PACKS : FEW_PACKS;
  const int threads = static_cast<int>(cdiv(cdiv(each + more, of_thread), 32) * 32);
  const auto is_lined = [](const void* rows, int64_t stride) {
    return reinterpret_cast<uintptr_t>(rows) % LINE_BYTES == 0 && stride % LINE_ELEMENTS<T> == 0;
  };
  const bool lined = each % LINE_PACKS == 0 && is_lined(args.x, args.stride_xm) &&
                     is_lined(args.dout, args.stride_dm) && is_lined(args.dadded, args.stride_am) &&
                     is_lined(args.dx, args.N);
  const Layout layout = !alike ? Layout::DIFFER : lined ? Layout::LINED : Layout::ALIKE;
  AheadShape shape{blocks, static_cast<int>(each), of_thread, threads, 1, layout};
  const int row = matrices * shape.pitch() * 16;
  const int under_way = static_cast<int>(cdiv(BYTES_UNDER_WAY, row * shape.sm_blocks()));
  shape.stages = std::min(LEAST_BACKWARD_STAGES - 1 + under_way, MOST_BACKWARD_STAGES);
  if (lined && shape.ring(matrices) > RING_BYTES)
    shape.layout = Layout::ALIKE;  // stages as large as the parts
  return shape.ring(matrices) <= RING_BYTES ? shape : AheadShape{};
}

// Divides M rows into groups, if `resident` clusters run at once. If rounding to a multiple of `period` would
// leave more than an eighth of the GPU idle, up to MOST_WAVES times as many groups run, in as many waves.
// Else, if `uneven` groups are allowed and rows are many, the last 32nd of the rows goes to small groups, for
// the SMs that finish first: not all are equally fast. No groups if too few clusters run.
inline RowGroups row_groups(int64_t M, int resident, int period, bool uneven) {
  int waves = 1;
  const auto groups = [&] { return groups_for(M, waves * resident, period); };
  while (waves < MOST_WAVES && groups() < M && groups() * 8 < waves * resident * 7) ++waves;
  const int64_t large = groups();
  if (large == 0) return {};
  const auto of = [&](int64_t large, int64_t many, int64_t few) {
    return RowGroups{static_cast<int>(M), static_cast<int>(large), static_cast<int>(many),
                     static_cast<int>(few), period};
  };
  if (uneven && waves == 1 && M >= MANY_ROWS * large) {
    const int64_t many = M * 31 / 32 / large, small = cdiv(large, 2 * period) * period;
    return of(large, many, cdiv(M - large * many, small));
  }
  // The fewest groups that need as many rounds: they leave fewer partial sums.
  const int64_t many = cdiv(M, large);
  return of(large < M ? cdiv(cdiv(M, many), period) * period : M, many, 1);
}

// Launches kernel(args, shape, groups, workspace), compiled for the packs and the layout of `shape`, and then
// sum_kernel. False if the GPU has no room for the cluster, or runs too few clusters for rows of so many
// skews.
template <typename T, typename Kernel>
bool launch_backward_ahead(const NormBackwardArgs& args, const AheadShape& shape, Kernel* kernel,
                           bool centered, void (*sum_kernel)(const float*, int, int64_t, T*, T*)) {
  if (shape.blocks == 0 || most_shared_memory() < AHEAD_BYTES) return false;
  allow_shared_memory(kernel, AHEAD_BYTES);
  // At least a block's share of the SM, which keeps further blocks off it: they would have more bytes under
  // way.
  const int ring = std::max(shape.ring(args.dadded ? 3 : 2), RING_BYTES / shape.sm_blocks());
  ClusterLaunch launch(reinterpret_cast<const void*>(kernel), shape.blocks, shape.threads,
                       ring + shape.sums(), args.stream);
  const int period = shape.layout == Layout::ALIKE ? skew_period<T>(args.stride_xm) : 1;
  const RowGroups groups = row_groups(args.M, launch.resident(), period, shape.sm_blocks() > 1);
  if (groups.large == 0) return false;
  launch_with_early_sums<T>(
      args, groups.count(), centered,
      [&](float* workspace) { launch(groups.count(), kernel, args, shape, groups, workspace); }, sum_kernel);
  return true;
}
