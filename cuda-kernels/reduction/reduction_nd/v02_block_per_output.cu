// reduction_nd v02_block_per_output: the threads of a block share an output's elements.
//
// Change:   thread t of a block takes elements t, t + 256, ...; then warps merge what they have by shuffles,
//           and the first thread merges what the warps have.
// Why:      along rows, neighbouring threads now read neighbouring elements, one or two lines a load. Down
//           columns it is the other way round: a load brings a sector of 16 columns for one of them, and the
//           blocks of the other columns find it in L2 if they come soon.
// Error:    at most (R / 256 + 13) eps/2 sum|x|.
// Counter:  along rows sectors_per_load fall to 2, and the time falls.
// Requires: nothing. If an output has few elements, most of its block is idle.
// Twin:     triton-kernels/reduction/reduction_nd/v02_block_per_output.py
#include <algorithm>

#include "totals.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int64_t MOST_BLOCKS = (int64_t{1} << 31) - 1;

struct Offsets {
  int64_t offset;  // in x
  int64_t step;    // in out, or among the places that argmax tells
};

__device__ Offsets place_of(const Axes& axes, int64_t index) {
  Offsets place = {0, 0};
  for (int a = axes.rank - 1; a >= 0; --a) {
    const int64_t at = index % axes.axis[a].size;
    place.offset += at * axes.axis[a].stride;
    place.step += at * axes.axis[a].step;
    index /= axes.axis[a].size;
  }
  return place;
}

template <typename T, typename Total>
__global__ void __launch_bounds__(THREADS)
    reduction_nd_v02_block_per_output_kernel(const T* x, void* out, const __grid_constant__ Axes kept,
                                             const __grid_constant__ Axes reduced, float divisor) {
  __shared__ Total parts[THREADS / 32];
  for (int64_t output = blockIdx.x; output < kept.count; output += gridDim.x) {
    const Offsets place = place_of(kept, output);
    Total total = Total::none();
    for (int64_t index = threadIdx.x; index < reduced.count; index += THREADS) {
      const Offsets at = place_of(reduced, index);
      total.add(x[place.offset + at.offset], at.step);
    }
    total = merge_block<THREADS>(total, parts);
    if (threadIdx.x == 0) store<T>(total, out, place.step, divisor);
    __syncthreads();  // waits until the first thread has read the parts
  }
}

}  // namespace

void reduction_nd_v02_block_per_output(const ReductionNdArgs& args) {
  const Axes &kept = args.kept, &reduced = args.reduced;
  if (kept.count == 0) return;
  dispatch_totals(args, [&](auto zero, auto total) {
    using T = decltype(zero);
    reduction_nd_v02_block_per_output_kernel<T, decltype(total)>
        <<<std::min(kept.count, MOST_BLOCKS), THREADS, 0, args.stream>>>(
            static_cast<const T*>(args.x), args.out, kept, reduced, args.divisor());
  });
  CUDA_CHECK(cudaGetLastError());
}
