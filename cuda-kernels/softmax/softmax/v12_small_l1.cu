// softmax v12_small_l1: a smaller L1, so that an SM has fewer rows in flight.
//
// Change:   v11's kernel, compiled without the code for ragged packs, is launched with the largest shared
//           memory carveout. The kernel hardly uses shared memory; the carveout leaves 28 of the SM's 256 KiB
//           to L1.
// Why:      a load reserves its line in L1 until the data arrive, so the size of L1 bounds the bytes in
//           flight. With all of L1 an SM has 64 KiB of rows and more in flight. More requests at once
//           probably make device memory open and close its pages, and turn from reads to writes, more often.
//           In trials, blocks that reserved shared memory, which also shrinks L1, were faster as well.
// Counter:  the time falls at rows of 1024 and 4096.
// Requires: compute capability 9.0; contiguous rows.
// Routes:   rows that all start at a line, of 17 to 1024 packs: this kernel
//           all others: v11; misaligned neighbours share a line, which L1 keeps for the second row
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

// True if every row of x starts at a line. If out's rows do not, their skew differs from x's, and
// launch_held_rows refuses; if they do, rows have whole packs only.
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
