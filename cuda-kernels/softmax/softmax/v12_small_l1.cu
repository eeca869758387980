// softmax v12_small_l1: an SM has fewer rows under way.
//
// Change:   where rows start with lines, v11's kernel, compiled without ends of rows, is launched with as
//           much of an SM's 256 KiB set aside for shared memory as can be, of which it uses next to nothing;
//           28 KiB stay for L1.
// Why:      what a load asks for has a place in L1 until it comes, so L1 bounds how much an SM has under way.
//           With all of L1 that is 64 KiB of rows and more. The more are asked for at once, the more often
//           device memory is likely to open and close its pages, and to turn from reads to writes. In
//           trials blocks that reserved shared memory, which leaves less to L1, were faster by 1 %, and
//           so was this.
// Counter:  the time falls to 0.99 of v11's at rows of 1024 and 4096.
// Requires: as v11. Rows that start anywhere are v11's: two of them share a line, which the one finds in L1
//           that the other has asked for.
// Source:   CUDA C++ Programming Guide, "Unified Data/L1/Texture Cache"; the launch attribute is the CUDA
//           Runtime API's cudaLaunchAttributePreferredSharedMemoryCarveout
// Twin:     none, see the spec
#include "held_row.cuh"

void softmax_v11_rows_per_warp(const SoftmaxArgs& args);

namespace {

template <typename T, bool LOG, typename As>
__global__ void __launch_bounds__(As::THREADS, As::BLOCKS)
    softmax_v12_small_l1_kernel(const T* __restrict__ x, T* __restrict__ out, int64_t M, int N,
                                int64_t stride_xm) {
  softmax_of_held_row<T, LOG, As, true>(x, out, M, N, stride_xm);
}

// out's rows, which are contiguous, then have whole packs only, or are skewed otherwise than x's, which
// launch_held_rows refuses.
template <typename T>
bool start_with_lines(const SoftmaxArgs& args) {
  return reinterpret_cast<uintptr_t>(args.x) % LINE_BYTES == 0 && args.stride_xm % LINE_ELEMENTS<T> == 0;
}

template <typename T, bool LOG>
bool launch(const SoftmaxArgs& args) {
  return start_with_lines<T>(args) &&
         launch_held_rows<T>(args, [&]<typename As>(As, int64_t blocks, int64_t threads) {
           launch_with_small_l1(blocks, threads, args.stream, softmax_v12_small_l1_kernel<T, LOG, As>,
                                static_cast<const T*>(args.x), static_cast<T*>(args.out), args.M,
                                static_cast<int>(args.N), args.stride_xm);
         });
}

}  // namespace

void softmax_v12_small_l1(const SoftmaxArgs& args) {
  if (args.M == 0 || args.N == 0) return;
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!(args.log ? launch<T, true>(args) : launch<T, false>(args))) softmax_v11_rows_per_warp(args);
  });
}
