// linear's backward pass beside its two products: dz = dout * activation'(saved) and dbias, in one pass.
//
// A block takes rows of a strip of columns; each thread sums its columns of dz in fp32. A second, small
// launch adds the blocks' sums in a fixed order, so that every run gives the same bits.
#include <algorithm>

#include "args.h"
#include "lib/activation.cuh"

constexpr int WARPS = 8;
constexpr int BLOCKS_PER_SM = 4;

// VECTOR neighbours a lane, so that a warp reads 32 * VECTOR columns of a row. `partials`: [chunks, N].
template <typename T, Activation ACTIVATION, int VECTOR>
__global__ void __launch_bounds__(WARPS * 32)
    linear_backward_kernel(const T* dout, const T* saved, T* dz, float* partials, int64_t M, int64_t N,
                           int strips, int64_t chunk_rows) {
  struct alignas(VECTOR * sizeof(T)) Vector {
    T of[VECTOR];
  };
  __shared__ float totals[WARPS][32 * VECTOR];
  const int lane_id = threadIdx.x % 32;
  const int warp_id = threadIdx.x / 32;
  const int64_t chunk = blockIdx.x / strips;
  const int64_t col = (int64_t{blockIdx.x % strips} * 32 + lane_id) * VECTOR;
  const int64_t end = min(M, (chunk + 1) * chunk_rows);
  float sums[VECTOR] = {};
  if (col < N) {
    for (int64_t row = chunk * chunk_rows + warp_id; row < end; row += WARPS) {
      const int64_t at = row * N + col;
      const Vector gradient = *reinterpret_cast<const Vector*>(dout + at);
      const Vector value = *reinterpret_cast<const Vector*>(saved + at);
      Vector result;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float slope = derivative<ACTIVATION>(to_float(value.of[i]));
        // 0 even for an infinite gradient, where the product would be NaN.
        const bool held = ACTIVATION == Activation::relu && slope == 0.0f;
        result.of[i] = from_float<T>(held ? 0.0f : to_float(gradient.of[i]) * slope);
      }
      *reinterpret_cast<Vector*>(dz + at) = result;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sums[i] += to_float(result.of[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) totals[warp_id][lane_id * VECTOR + i] = sums[i];
  __syncthreads();  // for the sums of all warps
  for (int i = threadIdx.x; i < 32 * VECTOR; i += WARPS * 32) {
    const int64_t at = blockIdx.x % strips * int64_t{32 * VECTOR} + i;
    if (at >= N) break;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += totals[warp][i];
    partials[chunk * N + at] = total;
  }
}

template <typename T>
__global__ void linear_backward_bias_kernel(const float* partials, T* dbias, int64_t N, int64_t chunks) {
  const int64_t col = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (col >= N) return;
  float total = 0.0f;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) total += partials[chunk * N + col];
  dbias[col] = from_float<T>(total);
}

template <typename T, Activation ACTIVATION, int VECTOR>
static void launch(const LinearBackwardArgs& args) {
  const int64_t strips = cdiv(args.N, 32 * VECTOR);
  const int64_t most = cdiv(args.M, WARPS);  // each warp has a row at least
  const int64_t wanted = std::max<int64_t>(1, int64_t{multiprocessor_count()} * BLOCKS_PER_SM / strips);
  const int64_t chunk_rows = cdiv(args.M, std::min(most, wanted));
  const int64_t chunks = cdiv(args.M, chunk_rows);
  float* partials = static_cast<float*>(args.memory->workspace(chunks * args.N * sizeof(float)));
  linear_backward_kernel<T, ACTIVATION, VECTOR><<<strips * chunks, WARPS * 32, 0, args.stream>>>(
      static_cast<const T*>(args.dout), static_cast<const T*>(args.saved), static_cast<T*>(args.dz), partials,
      args.M, args.N, static_cast<int>(strips), chunk_rows);
  CUDA_CHECK(cudaGetLastError());
  linear_backward_bias_kernel<T>
      <<<cdiv(args.N, 128), 128, 0, args.stream>>>(partials, static_cast<T*>(args.dbias), args.N, chunks);
  CUDA_CHECK(cudaGetLastError());
}

void linear_backward(const LinearBackwardArgs& args) {
  const bool vectors = args.N % 8 == 0 && aligned_to_16_bytes(args.dout, args.saved, args.dz);
  const auto with_type = [&]<typename T>(T) {
    with_activation(args.activation, [&]<Activation ACTIVATION>() {
      if constexpr (ACTIVATION != Activation::none)
        vectors ? launch<T, ACTIVATION, 8>(args) : launch<T, ACTIVATION, 1>(args);
    });
  };
  args.dtype == Dtype::bf16 ? with_type(__nv_bfloat16{}) : with_type(__half{});
}
