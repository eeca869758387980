// rms_norm v04_rows_ahead: layer_norm's v07, without a mean.
//
// Change:   clusters are persistent: they draw rows from a counter, and keep weights in registers. The next
//           rows travel to a ring of stages in shared memory meanwhile, and blocks send each other their sums
//           of one row before they write the row before it. In misaligned rows, single lanes take the
//           elements at the row's ends. Shorter misaligned rows of several warps stay with one block, as in
//           v02, but their packs are counted from a line, as in softmax's v13.
// Why:      v02's clusters load, exchange, write and end; while one waits, its share of the SM loads nothing,
//           and weights come from L2 for every four rows.
// Counter:  time falls at rows of 50257, 65536 and 262144, and a little at one of 5003; at a row of 4096,
//           where v02's kernel runs, nothing moves.
// Requires: compute capability 9.0; contiguous rows.
//           - misaligned, of more than 128 packs, up to 64 KiB: this step's kernel for blocks
//           - others of up to 64 KiB: v02_cluster
//           - longer, up to 512 KiB: this step's kernel for clusters
//           - beyond that, or with a residual whose skew differs from x's: v02_cluster
// Source:   see layer_norm's v07
// Gap:      Triton gives a program no access to another one's shared memory, nor to barriers there.
#include "args.h"
#include "norm/norm_ahead.cuh"

void rms_norm_v02_cluster(const RmsNormArgs& args);

namespace {

constexpr int64_t SHORT_ROW = 64 * 1024;  // bytes up to which one block a row is faster
constexpr int64_t WARP_PACKS = 128;       // of a row, up to which v02 gives it a warp or a part of one
constexpr int SHORT_PACKS = 5, SHORT_THREADS = 832;
static_assert(SHORT_THREADS * SHORT_PACKS * 16 >= SHORT_ROW + LINE_BYTES, "a skewed row needs a line more");

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(AHEAD_THREADS, 1)
    rms_norm_v04_rows_ahead_kernel(const RmsNormArgs args, const Draws draws, int blocks, int each) {
  normalise_ahead<T, AHEAD_PACKS, false, WHOLE>(args, draws, blocks, each);
}

// A block takes a row, of at most blockDim.x * SHORT_PACKS packs.
template <typename T>
__global__ void __launch_bounds__(SHORT_THREADS)
    rms_norm_v04_rows_ahead_block_kernel(const RmsNormArgs args) {
  normalise_by_block<T, SHORT_PACKS, false, false, LINE_BYTES>(args);
}

// Launches the kernel for blocks if rows are misaligned and take several warps. Returns whether it did.
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
