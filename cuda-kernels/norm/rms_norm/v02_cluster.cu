// rms_norm v02_cluster: layer_norm's v04 and v05, without a mean.
//
// Change:   rows of up to 64 KiB are register-resident in a lane to a block, as in layer_norm's v04; longer
//           rows are split over the shared memory of a cluster, as in its v05.
// Why:      layer_norm's ladder found it. The parts of a row exchange one number instead of two, and no bias
//           is loaded. Trials of the kernel ran between the predictions and the recording.
// Counter:  dram_share rises; time falls at a row of 65536.
// Requires: compute capability 9.0; contiguous rows. Rows longer than a cluster's shared memory:
//           v01_two_passes.
// Source:   see layer_norm's v04 and v05
// Gap:      Triton gives a program no access to another one's shared memory.
#include "args.h"
#include "norm/norm_cluster.cuh"

void rms_norm_v01_two_passes(const RmsNormArgs& args);

namespace {

constexpr int LANES_THREADS = 128;               // of a block for rows of a warp or less
constexpr int FEW_PACKS = 4, FEW_THREADS = 512;  // for rows of several warps
constexpr int MANY_PACKS = 5, MANY_THREADS = 832;
constexpr int64_t BLOCK_ROW = 64 * 1024;  // bytes, up to which a block holds a row

// LANES lanes take a row, of at most LANES * PACKS packs.
template <typename T, int LANES, int PACKS, bool WHOLE>
__global__ void __launch_bounds__(LANES_THREADS) rms_norm_v02_cluster_lanes_kernel(const RmsNormArgs args) {
  normalise_by_lanes<T, LANES_THREADS, LANES, PACKS, false, WHOLE>(args);
}

// A block takes a row, of at most blockDim.x * PACKS packs.
template <typename T, int PACKS, int THREADS, bool WHOLE>
__global__ void __launch_bounds__(THREADS) rms_norm_v02_cluster_block_kernel(const RmsNormArgs args) {
  normalise_by_block<T, PACKS, false, WHOLE>(args);
}

template <typename T, bool WHOLE>
__global__ void __launch_bounds__(CLUSTER_THREADS, CLUSTER_BLOCKS)
    rms_norm_v02_cluster_kernel(const RmsNormArgs args, int rows, int period, int blocks, int each) {
  normalise_by_cluster<T, false, WHOLE>(args, rows, period, blocks, each);
}

template <typename T, int PACKS, int THREADS, bool WHOLE>
void launch_block(const RmsNormArgs& args) {
  const int64_t threads = cdiv(cdiv(packs_of<T>(args), PACKS), 32) * 32;
  rms_norm_v02_cluster_block_kernel<T, PACKS, THREADS, WHOLE>
      <<<static_cast<unsigned>(args.M), static_cast<unsigned>(threads), 0, args.stream>>>(args);
}

template <typename T, bool WHOLE>
void launch(const RmsNormArgs& args) {
  const int64_t packs = packs_of<T>(args);
  const bool launched = choose_lanes(packs, [&](auto lanes, auto each) {
    rms_norm_v02_cluster_lanes_kernel<T, lanes, each, WHOLE>
        <<<static_cast<unsigned>(cdiv(args.M, LANES_THREADS / lanes)), LANES_THREADS, 0, args.stream>>>(args);
  });
  if (launched) return;
  if (args.N * static_cast<int64_t>(sizeof(T)) > BLOCK_ROW) {
    if (!launch_by_cluster<T>(args, rms_norm_v02_cluster_kernel<T, WHOLE>)) rms_norm_v01_two_passes(args);
  } else if (packs <= FEW_PACKS * FEW_THREADS && packs % (128 * FEW_PACKS) == 0) {
    launch_block<T, FEW_PACKS, FEW_THREADS, WHOLE>(args);
  } else {
    launch_block<T, MANY_PACKS, MANY_THREADS, WHOLE>(args);
  }
}

}  // namespace

void rms_norm_v02_cluster(const RmsNormArgs& args) {
  if (args.M == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    are_whole<T>(args) ? launch<T, true>(args) : launch<T, false>(args);
  });
  CUDA_CHECK(cudaGetLastError());
}
