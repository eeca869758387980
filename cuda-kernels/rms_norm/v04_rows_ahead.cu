// rms_norm v04_rows_ahead: layer_norm's v07, without a mean.
//
// Change:   clusters stay for many rows, which they draw from a counter, with weights in registers. The next
//           rows travel to a ring of stages in shared memory meanwhile, and the blocks send each other their
//           sums of one row before they write the one before. Where rows start anywhere, the elements at
//           their ends are single lanes' instead of packs that are masked.
// Why:      v02's clusters load, exchange, write and end; while one waits, its part of the SM loads nothing,
//           and weights come from L2 for every four rows.
// Counter:  at a row of 4096 or 5003 nothing; the time falls to 0.73 of v02's at one of 50257, to 0.97 at one
//           of 65536, to 0.91 at one of 262144.
// Requires: compute capability 9.0; contiguous rows. Rows of up to 64 KiB are v02's; so are those of which
//           a block's part is beyond 32 KiB, and those with a residual that is skewed otherwise.
// Source:   see layer_norm's v07
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "../norm_ahead.cuh"
#include "args.h"

void rms_norm_v02_cluster(const RmsNormArgs& args);

namespace {

constexpr int64_t SHORT_ROW = 64 * 1024;  // bytes up to which a block each is faster

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(AHEAD_THREADS, 1)
    rms_norm_v04_rows_ahead_kernel(const RmsNormArgs args, const Draws draws, int blocks, int each) {
  normalise_ahead<T, AHEAD_PACKS, false, WHOLE>(args, draws, blocks, each);
}

template <typename T>
bool launch(const RmsNormArgs& args) {
  if (args.N * static_cast<int64_t>(sizeof(T)) <= SHORT_ROW) return false;
  return are_whole<T>(args) ? launch_ahead<T>(args, rms_norm_v04_rows_ahead_kernel<T, true>)
                            : launch_ahead<T>(args, rms_norm_v04_rows_ahead_kernel<T, false>);
}

}  // namespace

void rms_norm_v04_rows_ahead(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    if (!launch<decltype(zero)>(args)) rms_norm_v02_cluster(args);
  });
}
