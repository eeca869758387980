// rms_norm v04_rows_ahead: layer_norm's v07, without a mean.
//
// Change:   clusters stay for many rows, which they draw from a counter, with weights in registers. The next
//           rows travel to a ring of stages in shared memory meanwhile, and the blocks send each other their
//           sums of one row before they write the one before. Where rows start anywhere, the elements at
//           their ends are single lanes' instead of packs that are masked; shorter ones of that kind, of
//           several warps, are a block's as in v02, but their packs are counted by lines, as in softmax's
//           v09.
// Why:      v02's clusters load, exchange, write and end; while one waits, its part of the SM loads nothing,
//           and weights come from L2 for every four rows.
// Counter:  at a row of 4096 nothing, and 0.2 % at one of 5003; the time falls to 0.77 of v02's at one of
//           50257, to 0.97 at one of 65536, to 0.87 at one of 262144.
// Requires: compute capability 9.0; contiguous rows. Rows of up to 64 KiB are v02's, but for those counted
//           by lines; so are those of which a block's part is beyond 32 KiB, and those with a residual that
//           is skewed otherwise.
// Source:   see layer_norm's v07
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "norm/norm_ahead.cuh"

void rms_norm_v02_cluster(const RmsNormArgs& args);

namespace {

constexpr int64_t SHORT_ROW = 64 * 1024;  // bytes up to which a block each is faster
constexpr int64_t WARP_PACKS = 128;       // of a row, up to which v02 gives it a warp or less
constexpr int SHORT_PACKS = 5, SHORT_THREADS = 832;
static_assert(SHORT_THREADS * SHORT_PACKS * 16 >= SHORT_ROW + LINE_BYTES, "a skewed row needs a line more");

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(AHEAD_THREADS, 1)
    rms_norm_v04_rows_ahead_kernel(const RmsNormArgs args, const Draws draws, int blocks, int each) {
  normalise_ahead<T, AHEAD_PACKS, false, WHOLE>(args, draws, blocks, each);
}

// A row for every block, of at most blockDim.x * SHORT_PACKS packs.
template <typename T>
__global__ void __launch_bounds__(SHORT_THREADS)
    rms_norm_v04_rows_ahead_block_kernel(const RmsNormArgs args) {
  normalise_by_block<T, SHORT_PACKS, false, false, LINE_BYTES>(args);
}

// Launches it where rows start anywhere and are several warps'. Whether it did.
template <typename T>
bool launch_by_block(const RmsNormArgs& args) {
  if (are_whole<T>(args) || packs_of<T>(args) <= WARP_PACKS) return false;
  const int64_t threads = cdiv(cdiv(most_packs<T, LINE_BYTES>(args.N), SHORT_PACKS), 32) * 32;
  rms_norm_v04_rows_ahead_block_kernel<T>
      <<<static_cast<unsigned>(args.M), static_cast<unsigned>(threads), 0, args.stream>>>(args);
  CUDA_CHECK(cudaGetLastError());
  return true;
}

template <typename T>
bool launch(const RmsNormArgs& args) {
  if (args.N * static_cast<int64_t>(sizeof(T)) <= SHORT_ROW) return launch_by_block<T>(args);
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
