// softmax v11_rows_per_warp: short rows are held as v10's long ones are, by a warp or a few.
//
// Change:   a row of up to 3.5 KiB lies in the registers of a warp, one of up to 16 KiB in those of a block
//           of as many warps as hold it with three packs a lane or four. Packs are counted from a line and
//           always whole; elements at the ends of skewed rows are single lanes'.
// Why:      where rows start anywhere, a lane of v05 takes the elements of the packs at both ends one by one,
//           to load and to store, while the others wait; v09's block masks such packs. Trials of the
//           kernel ran before the predictions.
// Counter:  at a row of 4096 instructions fall to 0.75 of v10's, and the time does not; it falls to 0.86 at
//           one of 515.
// Requires: as v10, whose other rows are: those of more than 16 KiB or up to 256 bytes, of either up to a
//           line less where they start anywhere, and those where the result is skewed otherwise than x.
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
