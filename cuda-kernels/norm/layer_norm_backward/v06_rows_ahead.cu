// layer_norm_backward v06_rows_ahead: the copy engine brings rows several ahead of time, and nobody waits for
// all others.
//
// Change:   rows of x, dout and dadded come into a ring in shared memory by bulk copies, each as soon as all
//           warps are done with an older one. A row's sums are sent, warp by warp and block by block, before
//           dx of the row before is written. Small groups have the last rows. The kernel that adds the
//           groups' sums asks for many at once, and is set up while the one before it ends.
// Why:      v04's threads hold the row that comes in their registers, so little is under way, and nothing
//           while they wait for their block and for their cluster. And where rows are few, its last kernel
//           walks over hundreds of groups' sums in small steps. Triton's v05, which waits for the sums a
//           row later, is faster.
// Counter:  at rows of 4096 dram_share is 86 % and the time falls by 1 %; by 16 % at rows of 5003, by
//           18 % at those of 262144, by 6 % at those of 65536.
// Requires: compute capability 9.0; contiguous rows. Those of up to 128 packs are lanes', as in v03, but for
//           those of 65 and more where an SM has fewer than 64 rows. Where the rows of x, dout, dadded and dx
//           do not start alike within 16 bytes, are of more than 512 KiB, with dadded 366, or are skewed in
//           more ways than the GPU has room for, they are v04's.
// Source:   PTX ISA, "cp.async.bulk", "st.async" and "griddepcontrol"
// Gap:      Triton gives a program no access to another one's shared memory, nor to the barriers that let its
//           warps run apart.
#include "args.h"
#include "norm/norm_backward_ahead.cuh"

void layer_norm_backward_v04_cluster(const LayerNormBackwardArgs& args);

namespace {

// Rows of so many packs go to blocks as long ones do, where an SM has few: lanes' sums would take long.
constexpr int LEAST_PACKS = 65, FEW_ROWS = 64;

// A row for every LANES lanes, of at most LANES * PACKS packs.
template <typename T, int LANES, int PACKS, bool WHOLE>
__global__ void __launch_bounds__(LANES_THREADS)
    layer_norm_backward_v06_rows_ahead_lanes_kernel(const LayerNormBackwardArgs args, float* workspace) {
  backward_by_lanes_early<T, LANES, PACKS, true, WHOLE>(args, workspace);
}

// A row for every cluster, whose threads have up to PACKS packs of it.
template <typename T, int PACKS, bool LINED>
__global__ void __launch_bounds__(AHEAD_THREADS, 1)
    layer_norm_backward_v06_rows_ahead_kernel(const LayerNormBackwardArgs args, const AheadShape shape,
                                              const RowGroups groups, float* workspace) {
  backward_rows_ahead<T, PACKS, true, LINED>(args, shape, groups, workspace);
}

template <typename T>
__global__ void __launch_bounds__(SUM_COLUMNS* SUM_WARPS, 2)
    layer_norm_backward_v06_rows_ahead_sum_kernel(const float* workspace, int groups, int64_t N, T* dweight,
                                                  T* dbias) {
  add_partial_sums_at_once(workspace, groups, N, dweight, dbias);
}

template <typename T, bool WHOLE>
bool launch_lanes(const LayerNormBackwardArgs& args) {
  return choose_lanes(packs_of<T>(args), [&](auto lanes, auto packs) {
    const auto kernel = layer_norm_backward_v06_rows_ahead_lanes_kernel<T, lanes, packs, WHOLE>;
    const int blocks = lanes_blocks<T>(args, kernel, LANES_THREADS / lanes);
    launch_with_early_sums<T>(
        args, blocks, true,
        [&](float* workspace) { kernel<<<blocks, LANES_THREADS, 0, args.stream>>>(args, workspace); },
        layer_norm_backward_v06_rows_ahead_sum_kernel<T>);
  });
}

template <typename T>
bool launch(const LayerNormBackwardArgs& args) {
  if (args.M == 0) return false;
  const bool are_few = packs_of<T>(args) >= LEAST_PACKS && args.M < FEW_ROWS * multiprocessor_count();
  if (!are_few && (are_whole<T>(args) ? launch_lanes<T, true>(args) : launch_lanes<T, false>(args)))
    return true;
  if (!are_alike<T>(args)) return false;
  const AheadShape shape = ahead_shape<T>(args);
  const auto kernel_of = [&](auto packs) {
    return shape.lined ? &layer_norm_backward_v06_rows_ahead_kernel<T, packs, true>
                       : &layer_norm_backward_v06_rows_ahead_kernel<T, packs, false>;
  };
  const auto kernel = shape.packs == FEW_PACKS ? kernel_of(std::integral_constant<int, FEW_PACKS>{})
                                               : kernel_of(std::integral_constant<int, MANY_PACKS>{});
  return launch_ahead<T>(args, shape, kernel, true, layer_norm_backward_v06_rows_ahead_sum_kernel<T>);
}

}  // namespace

void layer_norm_backward_v06_rows_ahead(const LayerNormBackwardArgs& args) {
  if (args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) layer_norm_backward_v04_cluster(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
