// reduction_nd v01_thread_per_output: a thread walks over all elements of its output.
//
// Change:   none yet, this is where the ladder starts.
// Why:      the definition, word for word, for any strides. The number of an element is divided by the size
//           of every axis to find its address: 64-bit divisions, each about a hundred instructions. If the
//           kept axis is contiguous, neighbouring threads read neighbouring elements; along rows, every load
//           of a warp touches 32 lines.
// Error:    a running sum in fp32: at most R eps/2 sum|x|, and for random terms a quarter eps.
// Counter:  dram_share stays low; sectors_per_load is 32 along rows.
// Requires: outputs of up to 2^16 elements each, which take a thread tens of milliseconds.
// Twin:     triton-kernels/reduction/reduction_nd/v01_thread_per_output.py
#include "totals.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int64_t MOST_ELEMENTS = 1 << 16;

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
    reduction_nd_v01_thread_per_output_kernel(const T* x, void* out, const __grid_constant__ Axes kept,
                                              const __grid_constant__ Axes reduced, float divisor) {
  // The block's index is widened first: 2^31 outputs and more overflow 32 bits.
  const int64_t output = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (output >= kept.count) return;
  const Offsets place = place_of(kept, output);
  Total total = Total::none();
  for (int64_t index = 0; index < reduced.count; ++index) {
    const Offsets at = place_of(reduced, index);
    total.add(x[place.offset + at.offset], at.step);
  }
  store<T>(total, out, place.step, divisor);
}

}  // namespace

void reduction_nd_v01_thread_per_output(const ReductionNdArgs& args) {
  const Axes &kept = args.kept, &reduced = args.reduced;
  if (reduced.count > MOST_ELEMENTS) {
    throw std::runtime_error("an output is made of " + std::to_string(reduced.count) +
                             " elements, a thread of v01_thread_per_output takes " +
                             std::to_string(MOST_ELEMENTS) + ": take v02_block_per_output");
  }
  if (kept.count == 0) return;
  dispatch_totals(args, [&](auto zero, auto total) {
    using T = decltype(zero);
    reduction_nd_v01_thread_per_output_kernel<T, decltype(total)>
        <<<cdiv(kept.count, THREADS), THREADS, 0, args.stream>>>(static_cast<const T*>(args.x), args.out,
                                                                 kept, reduced, args.divisor());
  });
  CUDA_CHECK(cudaGetLastError());
}
