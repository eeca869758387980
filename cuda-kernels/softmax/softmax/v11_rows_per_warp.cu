// softmax v11_rows_per_warp: short rows are register-resident in one warp, or in the warps of one block.
//
// Change:   a row of up to 3.5 KiB is held by one warp, a row of up to 16 KiB by a block with three or four
//           packs a lane. As in v10, packs are counted from a line and are always whole; the elements of
//           ragged packs go to single lanes, one element each.
// Why:      in a misaligned row, a lane of v05 loads and stores the elements of a ragged pack one after the
//           other, while the other lanes wait; v09 masks such packs. Trials of the kernel ran before the
//           predictions.
// Counter:  instructions fall; the time falls at misaligned rows of 515, and stays at aligned rows of 4096.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   up to 16 packs: v10, which passes them on to v05
//           up to 224 packs, 3.5 KiB: one warp a row
//           up to 384 packs, 6 KiB: a block of up to four warps a row, three packs a lane
//           up to 1024 packs, 16 KiB: a block of up to eight warps a row, four packs a lane
//           longer, or if out's skew within 16 bytes differs from x's: v10
//           A misaligned row's packs are counted from the line it starts in.
// Source:   see v10
// Twin:     none, see the spec
#include "held_row.cuh"

void softmax_v10_cluster_registers(const SoftmaxArgs& args);

namespace {

template <typename T, bool LOG, typename As>
__global__ void __launch_bounds__(As::THREADS, As::BLOCKS)
    softmax_v11_rows_per_warp_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                     int64_t stride_xm) {
  softmax_of_held_row<T, LOG, As, false>(x, out, M, N, stride_xm);
}

template <typename T, bool LOG>
bool launch(const SoftmaxArgs& args) {
  return launch_held_rows<T>(args, [&]<typename As>(As, int64_t blocks, int64_t threads) {
    softmax_v11_rows_per_warp_kernel<T, LOG, As>
        <<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, args.stream>>>(
            static_cast<const T*>(args.x), static_cast<T*>(args.out), args.M, static_cast<int>(args.N),
            args.stride_xm);
    CUDA_CHECK(cudaGetLastError());
  });
}

}  // namespace

void softmax_v11_rows_per_warp(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!(args.log ? launch<T, true>(args) : launch<T, false>(args))) softmax_v10_cluster_registers(args);
  });
}
