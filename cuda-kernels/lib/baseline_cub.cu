// Baselines from CUB, CUDA's own library of device-wide algorithms, called as its documentation shows.
//
// DeviceTransform chooses its tile size in a process's first call for a type and keeps it; after a small
// vector it keeps a small tile. Whoever times it must make the first call with a large vector.
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_transform.cuh>
#include <cuda/std/functional>
#include <cuda/std/tuple>

#include "common.cuh"
#include "elementwise/vector_add/args.h"
#include "reduction/reduction/args.h"

namespace {

template <typename T>
struct Add {
  __device__ T operator()(T a, T b) const { return from_float<T>(to_float(a) + to_float(b)); }
};

struct ToFloat {
  template <typename T>
  __device__ float operator()(T value) const {
    return to_float(value);
  }
};

}  // namespace

void vector_add_cub(const VectorAddArgs& args) {
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto inputs = cuda::std::make_tuple(static_cast<const T*>(args.a), static_cast<const T*>(args.b));
    CUDA_CHECK(
        cub::DeviceTransform::Transform(inputs, static_cast<T*>(args.out), args.n, Add<T>{}, args.stream));
  });
}

void reduction_cub(const ReductionArgs& args) {
  dispatch(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    CUDA_CHECK(cub::DeviceReduce::TransformReduce(args.workspace, *args.workspace_bytes,
                                                  static_cast<const T*>(args.x), args.out, args.n,
                                                  cuda::std::plus<float>{}, ToFloat{}, 0.0f, args.stream));
  });
}
